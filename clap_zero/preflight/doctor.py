"""`clap-zero doctor`: what would spoil a run, on this machine or on all nodes of a hostfile, before one is started."""

from __future__ import annotations

import contextlib
import secrets
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from clap_zero.errors import ConfigError, LaunchError
from clap_zero.launching.hostfile import HostSlots, read_hostfile
from clap_zero.preflight.compare import clock_skew, compare
from clap_zero.preflight.findings import Finding, errors_of, notes_of
from clap_zero.preflight.machine import Facts, launcher_environment, python_path, ssh_command
from clap_zero.preflight.node import Request, examine
from clap_zero.preflight.remote import NodeReport, Way, ask_nodes
from clap_zero.preflight.space import free_bytes, leave_mark, nearest_directory, told_bytes
from clap_zero.preflight.table import table
from clap_zero.preflight.versions import missing_packages

HELP = """\
usage: clap-zero doctor [--hostfile F] [--ranks N] [TRAIN_FLAGS ...]

Looks for what would spoil a run: versions, code, GPUs, disk, shared memory, limits, ports, ssh, clocks, stale locks of
compilations; then starts ranks that send each other known numbers. Trains nothing. Ends with 5 if something is wrong.
With the flags of `train` it looks at that run's directory and data.

  --hostfile F       look at all hosts of this file, over ssh, from here; unit -, default: this machine only
  --ranks N          ranks to start on this machine, 0: none; unit count, default: one a GPU, at least 2. With
                     --hostfile the file's slots count; 0 leaves them out
  --ssh COMMAND      program and options to reach the hosts; unit -, default: $CLAP_ZERO_SSH, else ssh
  --master_addr A    address at which the ranks will meet; unit -, default: this machine's first
  --master_port P    port at which they will meet; unit -, default 29500
"""

_OWN = {"hostfile": "", "ranks": "", "ssh": "", "master_addr": "", "master_port": "29500"}
_RANKS_MODULE = "clap_zero.preflight.ranks"
_RANKS_WAIT_S = 600.0


@dataclass(frozen=True)
class Asked:
    """What the doctor shall look at.

    Attributes:
        hosts: Of the hostfile; empty: this machine only.
        hostfile: Its path.
        num_ranks: Ranks to start; None: as many as fit.
        ssh: Program and options.
        master_addr: Empty: this machine's first address.
        master_port: At the first host.
        directory: Where the run's files shall go.
        files: Shards and their sizes in bytes.
    """

    hosts: tuple[HostSlots, ...]
    hostfile: str
    num_ranks: int | None
    ssh: tuple[str, ...]
    master_addr: str
    master_port: int
    directory: Path
    files: dict[str, int]


def run(argv: Sequence[str]) -> int:
    """Looks, prints what it saw, and what is worth a warning.

    Returns:
        0 where nothing is wrong.

    Raises:
        LaunchError: Something is, one line each.
        ConfigError: The command is not understood.
    """
    if any(token in ("--help", "-h") for token in argv):
        print(HELP, end="")
        return 0
    asked = _read(argv)
    here = examine(Request(str(asked.directory), files=asked.files, port=0 if asked.hosts else asked.master_port))
    facts = Facts.from_dict(here.facts)
    own = (*here.findings, *missing_packages(facts.versions))
    reports = [NodeReport(f"{facts.host} (here)", facts, own)]
    if asked.hosts:
        reports += _ask_all(asked, facts)
    findings = _judge(reports)
    print("\n".join([*_told(reports, asked), *notes_of(findings)]), flush=True)
    if errors_of(findings):
        raise LaunchError("\n".join(errors_of(findings)))
    if asked.num_ranks != 0:
        first = (reports[1].facts if asked.hosts else None) or facts
        words = _remote_command(asked, first) if asked.hosts else _local_command(asked, facts)
        _start_ranks(words, launcher_environment(asked.ssh))
    print("nothing that would spoil a run was found")
    return 0


def _read(argv: Sequence[str]) -> Asked:
    own, rest = _split(argv)
    directory, files = Path("runs"), {}
    if rest:
        from clap_zero.config.load import parse_command_line

        command = parse_command_line(rest)
        directory = Path(str(command.run.run_dir))
        if command.run.data.train:
            from clap_zero.data.index import index_of
            from clap_zero.preflight.shared import sampled_files

            for entries in (command.run.data.train, command.run.data.val):
                files.update(sampled_files(index_of(entries, command.run.data)) if entries else {})
    try:
        ssh = tuple(shlex.split(own["ssh"] or ssh_command()))
    except ValueError as error:
        raise ConfigError(f"--ssh {own['ssh']}: {error}; such as --ssh 'ssh -F file'") from error
    for flag in ("ranks", "master_port"):
        if own[flag] and not (own[flag].isascii() and own[flag].isdecimal()):
            raise ConfigError(f"--{flag} {own[flag]}: a whole number is needed")
    return Asked(
        hosts=tuple(read_hostfile(own["hostfile"])) if own["hostfile"] else (),
        hostfile=own["hostfile"],
        num_ranks=int(own["ranks"]) if own["ranks"] else None,
        ssh=ssh or ("ssh",),
        master_addr=own["master_addr"],
        master_port=int(own["master_port"]),
        directory=nearest_directory(directory),
        files=files,
    )


def _split(argv: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Takes the doctor's own flags out of a command line that is otherwise that of `train`."""
    own, rest, tokens = dict(_OWN), [], iter(argv)
    for token in tokens:
        name, equals, value = token.removeprefix("--").partition("=")
        key = name.replace("-", "_")
        if not token.startswith("--") or key not in own:
            rest.append(token)
            continue
        following = value if equals else next(tokens, None)
        if following is None:
            raise ConfigError(f"{token} needs a value (clap-zero doctor --help)")
        own[key] = following
    return own, rest


def _ask_all(asked: Asked, facts: Facts) -> list[NodeReport]:
    way = Way(asked.ssh, sys.executable, str(Path.cwd()), python_path())
    address = asked.master_addr or next(iter(facts.addresses), "")
    with _listening(len(asked.hosts)) as port, _marked(asked.directory) as token:
        request = Request(str(asked.directory), token=token, contact=(address, port) if address else None)
        requests = [
            (
                entry.host,
                replace(request, files=asked.files, slots=entry.slots, port=0 if number else asked.master_port),
            )
            for number, entry in enumerate(asked.hosts)
        ]
        return ask_nodes(requests, way=way, expected=facts)


@contextlib.contextmanager
def _listening(num_hosts: int) -> Iterator[int]:
    """A port that the nodes try to reach; the kernel takes the calls, nobody has to answer."""
    with socket.create_server(("", 0), backlog=2 * num_hosts + 8) as server:
        yield server.getsockname()[1]


@contextlib.contextmanager
def _marked(directory: Path) -> Iterator[str]:
    """Leaves a token in the directory for the nodes to find. Empty where it cannot be written: that is told already."""
    token = secrets.token_hex(8)
    try:
        mark = leave_mark(directory, token)
    except OSError:
        yield ""
        return
    try:
        yield token
    finally:
        mark.unlink(missing_ok=True)


def _judge(reports: Sequence[NodeReport]) -> list[Finding]:
    """What the nodes said of themselves, and in what they differ from this machine."""
    answered = [(report.host, report.facts) for report in reports if report.facts is not None]
    found = [replace(one, host=report.host) for report in reports for one in report.findings]
    found += compare(answered)
    found += clock_skew([(report.host, report.ahead_s) for report in reports if report.facts is not None])
    # A machine that is in the hostfile says of itself what was seen here already.
    here = {one.text for one in reports[0].findings}
    same = {r.host for r in reports[1:] if r.facts is not None and r.facts.host == answered[0][1].host}
    return [one for one in found if not (one.host in same and one.text in here)]


def _told(reports: Sequence[NodeReport], asked: Asked) -> list[str]:
    rows = []
    for report in reports:
        facts = report.facts
        if facts is None:
            rows.append((report.host, *["-"] * 8))
            continue
        names = sorted({str(gpu["name"]) for gpu in facts.gpus})
        devices = f"{len(facts.gpus)} x {', '.join(names)}" if facts.gpus else "cpu"
        versions = (facts.versions.get(name, "-") for name in ("torch", "deepspeed", "transformers"))
        answer = f"{report.answer_s:.1f} s" if report.answer_s else "-"
        memory = told_bytes(facts.memory_bytes)
        rows.append(
            (report.host, facts.python, *versions, facts.code, devices, f"{facts.cores} cores, {memory}", answer)
        )
    free = free_bytes(asked.directory)
    header = ("host", "python", "torch", "deepspeed", "transformers", "code", "devices", "machine", "ssh")
    room = "" if free is None else f", {told_bytes(free)} free"
    files = f"; {len(asked.files)} files of the data looked at" if asked.files else ""
    return [*table(header, rows), f"files of a run go to {asked.directory}{room}{files}"]


def _remote_command(asked: Asked, first: Facts) -> list[str]:
    """One rank a slot on all hosts, as a training would start them."""
    program = str(Path(sys.executable).with_name("deepspeed"))
    words = [program, "--hostfile", asked.hostfile, "--force_multi", "--master_port", str(asked.master_port)]
    # The launcher would ask for the address with the plain ssh; here it is known, from ssh as the user gave it.
    address = asked.master_addr or next(iter(first.addresses), "")
    words += ["--master_addr", address] if address else []
    words += ["--no_ssh_check"] if len(asked.ssh) > 1 else []
    return [*words, "--module", _RANKS_MODULE]


def _local_command(asked: Asked, facts: Facts) -> list[str]:
    """One rank a GPU, at least two."""
    count = asked.num_ranks or len(facts.gpus) or 2
    if facts.gpus and count > len(facts.gpus):
        raise ConfigError(f"--ranks {count}: only {len(facts.gpus)} GPUs are here")
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(count)]
    return [*words, "-m", _RANKS_MODULE]


def _start_ranks(words: list[str], environment: dict[str, str]) -> None:
    """Starts ranks that compare themselves and send known numbers; their table goes to this output.

    Raises:
        LaunchError: They did not come together, or saw something wrong; their own lines stand above.
    """
    print(f"starting ranks: {shlex.join(words)}", flush=True)
    try:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, timeout=_RANKS_WAIT_S, check=False, env=environment)
    except subprocess.TimeoutExpired:
        raise LaunchError(f"the ranks did not end within {_RANKS_WAIT_S:.0f} s: they cannot reach each other") from None
    except OSError as error:
        raise LaunchError(f"{words[0]} cannot be started: {error.strerror or error}") from error
    if done.returncode != 0:
        raise LaunchError(f"the ranks ended with {done.returncode}; what they saw stands above")
