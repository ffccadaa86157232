"""Which hosts and devices a command selects, which of them is this machine, and whether all can be reached."""

from __future__ import annotations

import contextlib
import errno
import functools
import ipaddress
import os
import random
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from clap_zero.errors import ConfigError, LaunchError

PORTS = range(20000, 29500)
"""Below the ports that Linux gives to outgoing connections, so that nobody takes one between choosing and use."""

SSH_TIMEOUT_S = 10
REACH_TIMEOUT_S = 30
MOST_AT_ONCE = 32

_PACKAGES = """
import importlib.util, sys
specs = {name: importlib.util.find_spec(name) for name in ("torch", "deepspeed", "clap_zero")}
absent = [name for name, spec in specs.items() if spec is None or spec.origin is None]
sys.exit(f"lacks {' and '.join(absent)}" if absent else 0)
"""
"""What the Python of a host is asked: finds packages without importing them. An empty folder has no origin."""

_NO_START = "DeepSpeed's launcher does not start there"

Devices = dict[str, list[int]]
"""Host -> numbers of its devices, one rank each, in the order of the ranks."""


def select(pool: Mapping[str, int], *, include: str = "", exclude: str = "", source: str) -> Devices:
    """What --include or --exclude leave, as DeepSpeed reads them: `w1@w2:0,2`.

    Args:
        pool: Host -> number of its devices.
        source: What the pool comes from, for messages.

    Raises:
        ConfigError: A host or device that is not there, text that cannot be read, or nothing is left.
    """
    every = {host: list(range(slots)) for host, slots in pool.items()}
    option, text = ("--include", include) if include else ("--exclude", exclude)
    if not text:
        return every
    named: Devices = {}
    for part in text.split("@"):
        host, colon, numbers = part.partition(":")
        if host not in every:
            raise ConfigError(f"{option} {text}: {host!r} is not in {source}, which has {', '.join(every)}")
        try:
            chosen = [int(number) for number in numbers.split(",")] if colon else every[host]
        except ValueError:
            raise ConfigError(f"{option} {text}: {part!r} is not of the form HOST:0,2 or HOST") from None
        absent = [number for number in chosen if number not in every[host]]
        if absent:
            has = f"has device 0 to {len(every[host]) - 1}" if len(every[host]) > 1 else "has device 0 alone"
            raise ConfigError(f"{option} {text}: {host} has no device {absent[0]}: it {has} ({source})")
        named[host] = sorted({*named.get(host, []), *chosen})
    if include:
        return {host: named[host] for host in every if host in named}
    left = {host: [n for n in numbers if n not in named.get(host, [])] for host, numbers in every.items()}
    left = {host: numbers for host, numbers in left.items() if numbers}
    if not left:
        raise ConfigError(f"--exclude {text} leaves no device of {source}")
    return left


def is_this_machine(host: str) -> bool:
    """Whether a name of a hostfile stands for the machine that we are on: an address of it can be bound here."""
    name = host.rpartition("@")[2]
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return name == socket.gethostname()  # a name that only ~/.ssh/config knows
    return any(_can_bind(family, address) for family, _, _, _, address in found)


def address_towards(host: str) -> str | None:
    """This machine's address on the way to another one; None where its name says nothing or leads back here."""
    name = host.rpartition("@")[2]
    with contextlib.suppress(OSError):
        family, _, _, _, address = socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing
            own = str(probe.getsockname()[0])
        if not ipaddress.ip_address(own.partition("%")[0]).is_loopback:
            return own
    return None


def is_port_free(port: int) -> bool:
    """Whether this user could listen on a TCP port of this machine now."""
    return port_trouble(port) is None


def port_trouble(port: int) -> str | None:
    """What keeps this user from listening on a TCP port of this machine; None where nothing does."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that wind down do not count
        try:
            probe.bind(("", port))
        except OSError as error:
            return {errno.EADDRINUSE: "is in use", errno.EACCES: "needs more rights than you have"}.get(
                error.errno or 0
            )
        return None


def free_port() -> int:
    """A TCP port that nobody uses at the moment.

    Raises:
        LaunchError: Ports enough were tried.
    """
    for port in random.sample(PORTS, 200):
        if is_port_free(port):
            return port
    raise LaunchError("no free port between 20000 and 29499 on this machine: give --master_port before -m")


def check_reachable(hosts: Iterable[str], *, ssh_port: int | None) -> None:
    """Ask every host over ssh, many at once, for the working directory, this Python and its packages.

    One that lacks them would fail at once, and the others wait for it in vain.

    Raises:
        LaunchError: There is no ssh, or the first host that does not answer or lacks one of them.
    """
    with ThreadPoolExecutor(MOST_AT_ONCE) as pool:
        answers = pool.map(functools.partial(_trouble, ssh_port=ssh_port), hosts)
        try:
            trouble = next(filter(None, answers), None)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    if trouble is not None:
        raise LaunchError(trouble)


def launcher_trouble(host: str, *, ssh_port: int | None, variables: Mapping[str, str]) -> str | None:
    """Why DeepSpeed's launcher does not start on a host; None where it does, or where that cannot be found out.

    Args:
        variables: What DeepSpeed hands over, such as a LD_LIBRARY_PATH that the libraries need: name -> what a shell
            reads between double quotes.
    """
    python = shlex.quote(sys.executable)
    question = "".join(f'export {name}="{value}"; ' for name, value in variables.items())
    question += f"cd {shlex.quote(str(Path.cwd()))} && {python} -c 'import deepspeed.launcher.launch' || exit 84"
    trouble = _asked(host, question, ssh_port=ssh_port)
    return trouble if trouble is not None and _NO_START in trouble else None


def _trouble(host: str, *, ssh_port: int | None) -> str | None:
    """What is wrong with a host; None for one that is as it has to be."""
    python = shlex.quote(sys.executable)
    question = f"cd {shlex.quote(str(Path.cwd()))} || exit 81; test -x {python} || exit 82; "
    question += f"{python} -c {shlex.quote(_PACKAGES)} || exit 83"
    return _asked(host, question, ssh_port=ssh_port)


def _asked(host: str, question: str, *, ssh_port: int | None) -> str | None:
    """What a command over ssh finds wrong with a host."""
    # A connection that stays behind for later ones would keep our pipe open. One that is there is used.
    words = ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={SSH_TIMEOUT_S}"]
    words += ["-o", "ControlMaster=no", *os.environ.get("PDSH_SSH_ARGS_APPEND", "").split()]  # as pdsh will call it
    words += ["-p", str(ssh_port)] if ssh_port is not None else []
    try:
        done = subprocess.run(
            [*words, host, question],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            timeout=REACH_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"{host} does not answer over ssh within {REACH_TIMEOUT_S} s"
    except FileNotFoundError:
        return "ssh is not installed here, and pdsh reaches the hosts through it (apt-get install openssh-client)"
    except OSError as error:
        return f"{host} cannot be asked over ssh: {error.strerror or error}"
    return _unreachable(host, done.returncode, done.stderr.splitlines()) if done.returncode else None


def _unreachable(host: str, code: int, said: Sequence[str]) -> str:
    if code == 81:
        return f"{host} has no folder {Path.cwd()}: the checkout has to stand under the same path on all hosts"
    if code == 82:
        return f"{host} has no {sys.executable}: the environment has to stand under the same path on all hosts"
    if code == 83:
        return f"{host}: {sys.executable} {said[-1].strip() if said else 'does not run'} there: install as on this host"
    if code == 84:
        return f"{host}: {_NO_START}: {said[-1].strip() if said else 'without a word'}"
    reason = said[-1].strip() if said else f"ssh ended with {code}"
    return f"{host} cannot be reached over ssh: {reason}; `ssh {host} true` has to work without a password"


def _can_bind(family: int, address: tuple) -> bool:
    with socket.socket(family) as probe:
        try:
            probe.bind((address[0], 0, *address[2:]))
        except OSError:
            return False
        return True
