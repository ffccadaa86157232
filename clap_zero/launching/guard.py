"""What `deepspeed ... -m clap_zero.train` gets wrong by itself, found or put right before anything starts.

`start.put_right` calls `protect` in DeepSpeed's program, and nowhere else. It works on the command line and the
environment alone; nothing of DeepSpeed is changed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import MutableSequence, Sequence
from pathlib import Path

from clap_zero.errors import ConfigError, LaunchError
from clap_zero.launching import command as this_command
from clap_zero.launching import local, options, remote
from clap_zero.launching.hostfile import HostSlots, read_hostfile
from clap_zero.launching.hosts import Devices, is_port_free, is_this_machine, select
from clap_zero.launching.options import LauncherOptions

DEFAULT_HOSTFILE = "/job/hostfile"
"""DeepSpeed reads it where no other is named."""

_TRAINING = "clap_zero.train"
_seen = False


def protect(argv: MutableSequence[str]) -> None:
    """Check and complete a command line of `deepspeed` in place; a second call does nothing.

    Args:
        argv: `sys.argv` of DeepSpeed's program, with --module in place of -m.

    Raises:
        ConfigError: As `check`.
        LaunchError: As `check`.
    """
    global _seen
    command = options.read(argv[1:])
    if _seen or command is None or not _is_ours(command):
        return
    _seen = True
    if command.program == _TRAINING:
        _check_flags(command.arguments)
    this_command.mark()
    argv[1:] = check(command).as_argv()


def check(command: LauncherOptions) -> LauncherOptions:
    """The command as it has to be.

    Raises:
        ConfigError: Options contradict each other, or select what is not there.
        LaunchError: The hostfile, a host or a tool is not as it has to be.
    """
    # DeepSpeed's own way to say "all", and what scripts write out.
    command = command.with_options(**{name: None for name in ("num_nodes", "num_gpus") if command.get(name) == -1})
    _check_options(command)
    hosts = _hosts(command)
    if hosts is None:
        return local.prepare(command)
    active = _active(command, hosts)
    command = local.with_clean_hostfile(command, hosts, default=DEFAULT_HOSTFILE)
    if command.get("no_ssh"):
        return _started_by_hand(command, active)
    alone = next(iter(active)) if len(active) == 1 else None
    if alone is None or command.get("force_multi") or not is_this_machine(alone):
        return remote.prepare(command.with_options(force_multi=True), active, whole=hosts)
    return local.prepare_listed(command, len(active[alone]), source=f"{_hostfile(command)}:{hosts[0].line}")


def _is_ours(command: LauncherOptions) -> bool:
    program = command.program
    return bool(command.get("module")) and (program == "clap_zero" or program.startswith("clap_zero."))


def _check_flags(arguments: Sequence[str]) -> None:
    """Unknown flags are refused here, once and at once: ranks that refuse them cost two imports of torch first.

    Ends the process where the arguments ask for help.
    """
    from clap_zero.config.flags import help_text, read_flags  # a fifth of a second: only where a training starts

    if read_flags(arguments).wants_help:
        with contextlib.suppress(BrokenPipeError):
            print(help_text(), end="", flush=True)
        os._exit(0)


def _check_options(command: LauncherOptions) -> None:
    if word := options.misplaced(command.arguments):
        raise ConfigError(f"{word} is an option of `deepspeed`: put it before -m {command.program}")
    if command.get("include") and command.get("exclude"):
        raise ConfigError("--include and --exclude are both given: keep one")
    filters = [f"--{name}" for name in ("include", "exclude") if command.get(name)]
    counts = [f"--{name}" for name in ("num_nodes", "num_gpus") if command.get(name) is not None]
    if filters and counts:
        raise ConfigError(f"{counts[0]} and {filters[0]} both say what to use: keep one")
    for name in ("num_nodes", "num_gpus"):
        value = command.get(name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name} {value}: at least 1 is needed")
    port = command.get("master_port")
    if port is not None and not 0 < port < 65536:
        raise ConfigError(f"--master_port {port}: ports go from 1 to 65535")


def _hostfile(command: LauncherOptions) -> str:
    return str(command.get("hostfile", DEFAULT_HOSTFILE))


def _hosts(command: LauncherOptions) -> list[HostSlots] | None:
    """The hosts of the command's hostfile; None where it has none, and means this machine.

    DeepSpeed would go on alone where the named file is missing.
    """
    path = _hostfile(command)
    if "hostfile" in command.given or Path(path).exists():
        return read_hostfile(path)
    if command.get("num_nodes", 1) > 1:
        raise ConfigError(f"--num_nodes {command.get('num_nodes')} needs --hostfile FILE with as many hosts, before -m")
    if command.get("no_ssh"):
        raise ConfigError("--no_ssh needs --hostfile FILE with the hosts and their slots, the same on all, before -m")
    if command.get("launcher", "pdsh").lower() != "pdsh" or command.get("force_multi"):
        raise ConfigError("--launcher and --force_multi need --hostfile FILE with the hosts and their slots, before -m")
    return None


def _active(command: LauncherOptions, hosts: list[HostSlots]) -> Devices:
    """The hosts and devices that the command selects from its hostfile."""
    source = _hostfile(command)
    active = select(
        {entry.host: entry.slots for entry in hosts},
        include=command.get("include", ""),
        exclude=command.get("exclude", ""),
        source=source,
    )
    nodes, gpus = command.get("num_nodes"), command.get("num_gpus")
    if nodes is not None and nodes > len(active):
        raise ConfigError(f"--num_nodes {nodes}: {source} has {len(active)} host(s)")
    chosen = dict(list(active.items())[:nodes])
    for entry in hosts:
        if gpus is not None and entry.host in chosen and gpus > entry.slots:
            raise ConfigError(f"--num_gpus {gpus}: {source}:{entry.line} gives {entry.host} slots={entry.slots}")
    return {host: devices[:gpus] for host, devices in chosen.items()}


def _started_by_hand(command: LauncherOptions, active: Devices) -> LauncherOptions:
    """With --no_ssh somebody starts the same command on each host: what it cannot find out has to be said."""
    rank = command.get("node_rank")
    if rank is None or not 0 <= rank < len(active):
        raise ConfigError(f"--no_ssh needs --node_rank, 0 to {len(active) - 1}, another one on each host")
    if not command.get("master_addr"):
        raise ConfigError("--no_ssh needs --master_addr, the address of the first host, the same on all hosts")
    if rank == 0 and not is_port_free(local.port_of(command)):
        raise LaunchError(local.port_taken(local.port_of(command)))
    return command.with_options(no_ssh_check=True)
