"""`clap-zero doctor`: what would spoil a run, on this machine or on all nodes of a hostfile, before one is started."""

from __future__ import annotations

import contextlib
import secrets
import shlex
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from clap_zero.config.own_flags import take_own
from clap_zero.errors import ConfigError, LaunchError
from clap_zero.launching.hostfile import HostSlots, read_hostfile
from clap_zero.launching.hosts import address_towards, is_this_machine
from clap_zero.preflight.compare import clock_skew, compare
from clap_zero.preflight.findings import Finding, errors_of, notes_of
from clap_zero.preflight.machine import Facts, launcher_environment, python_path, ssh_command
from clap_zero.preflight.node import Request, examine
from clap_zero.preflight.remote import NodeReport, Way, ask_nodes
from clap_zero.preflight.space import free_bytes, leave_mark, nearest_directory, told_bytes
from clap_zero.preflight.start import start_ranks
from clap_zero.preflight.table import table
from clap_zero.preflight.versions import missing_packages

HELP = """\
usage: clap-zero doctor [--hostfile F] [--ranks N] [TRAIN_FLAGS ...]

Looks for what would spoil a run: versions, code, GPUs, disk, shared memory, limits, ports, ssh, clocks, stale locks of
compilations; then starts ranks that send each other known numbers. Trains nothing. Ends with 5 if something is wrong.
With the flags of `train` it looks at that run's directory and data, and ends with 2 for a wrong flag, 3 for data that
are not there.

  --hostfile F       look at all hosts of this file, over ssh, from here; default: this machine only
  --ranks N          ranks to start on this machine, 0: none; default: one a GPU, at least 2. With
                     --hostfile the file's slots count; 0 leaves them out
  --ssh COMMAND      program and options to reach the hosts; default: $CLAP_ZERO_SSH, else ssh
  --master_addr A    address at which the ranks will meet; default: the launcher finds one
  --master_port P    port at which they will meet; default 29500 with --hostfile, else a free one
"""

_OWN = {"hostfile": "", "ranks": "", "ssh": "", "master_addr": "", "master_port": ""}
_DEFAULT_PORT = 29500
_RANKS_MODULE = "clap_zero.preflight.ranks"


@dataclass(frozen=True)
class Asked:
    """What the doctor shall look at.

    Attributes:
        hosts: Of the hostfile; empty: this machine only.
        hostfile: Its path.
        num_ranks: Ranks to start; None: as many as fit.
        ssh: Program and options.
        master_addr: Empty: the launcher finds one.
        master_port: At the first host; 0: any that is free.
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

    @property
    def is_here_alone(self) -> bool:
        """Whether the hostfile names this machine and no other: the launcher then needs no ssh, nor does the doctor."""
        return len(self.hosts) == 1 and is_this_machine(self.hosts[0].host)


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
    port = 0 if asked.hosts else asked.master_port
    here = examine(Request(str(asked.directory), files=asked.files, port=port, computes=not asked.hosts))
    facts = Facts.from_dict(here.facts)
    own = (*here.findings, *missing_packages(facts.versions))
    reports = [NodeReport(f"{facts.host} (here)", facts, own)]
    if asked.is_here_alone:
        request = Request(str(asked.directory), port=asked.master_port, files=asked.files, slots=asked.hosts[0].slots)
        seen = examine(request)
        reports.append(NodeReport(asked.hosts[0].host, Facts.from_dict(seen.facts), tuple(seen.findings)))
    elif asked.hosts:
        reports += _ask_all(asked, facts)
    findings = _judge(reports)
    print("\n".join([*_told(reports, asked), *notes_of(findings)]), flush=True)
    if errors_of(findings):
        raise LaunchError("\n".join(errors_of(findings)))
    if asked.num_ranks != 0:
        first = (reports[1].facts if asked.hosts else None) or facts
        words = _remote_command(asked, first) if asked.hosts else _local_command(asked, facts)
        start_ranks(words, launcher_environment(asked.ssh))
    print("nothing that would spoil a run was found")
    return 0


def _read(argv: Sequence[str]) -> Asked:
    own, rest = take_own(argv, _OWN)
    directory, files = Path("runs"), {}
    if rest:
        from clap_zero.config.ds_json import load_ds_json
        from clap_zero.config.load import parse_command_line

        command = parse_command_line(rest)
        load_ds_json(command.ds_path, command.ds_overrides)  # says what is wrong with it
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
        master_port=int(own["master_port"] or (_DEFAULT_PORT if own["hostfile"] else 0)),
        directory=nearest_directory(directory),
        files=files,
    )


def _ask_all(asked: Asked, facts: Facts) -> list[NodeReport]:
    way = Way(asked.ssh, sys.executable, str(Path.cwd()), python_path())
    with _listening(len(asked.hosts)) as port, _marked(asked.directory) as token:
        requests = []
        for number, entry in enumerate(asked.hosts):
            address = contact_address(asked.hosts, entry.host, master_addr=asked.master_addr)
            request = Request(
                str(asked.directory),
                token=token,
                contact=(address, port) if address else None,
                port=0 if number else asked.master_port,
                files=asked.files,
                slots=entry.slots,
            )
            requests.append((entry.host, request))
        return ask_nodes(requests, way=way, expected=facts)


def contact_address(hosts: Sequence[HostSlots], host: str, *, master_addr: str) -> str | None:
    """The address of this machine that a host has to reach; None where no run needs that.

    The ranks meet on the first host. Where that is another machine than this one, only the ranks can show whether they
    reach each other.

    Args:
        hosts: Of the hostfile.
        host: One of them.
        master_addr: Where the user has the ranks meet; empty: not said.
    """
    if not is_this_machine(hosts[0].host):
        return None
    return master_addr or address_towards(host)


@contextlib.contextmanager
def _listening(num_hosts: int) -> Iterator[int]:
    """A port that the nodes try to reach; the kernel takes the calls, nobody has to answer."""
    backlog = 2 * num_hosts + 8
    try:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        server = socket.create_server(("", 0), family=family, backlog=backlog, dualstack_ipv6=both)
    except OSError:  # IPv6 is there and switched off
        server = socket.create_server(("", 0), backlog=backlog)
    with server:
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
    # The machine that only starts the ranks has a say in versions and code, not in GPUs.
    ranks_on = answered[1:] if len(reports) > 1 else answered
    found += compare(answered, computing=ranks_on)
    if len(reports) > 1 and ranks_on and not any(facts.gpus for _, facts in ranks_on):
        text = "nvidia-smi shows no GPU on any host of the file: its ranks, one a slot, will compute on CPUs"
        found.append(Finding("warning", text))
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
    words = [program, "--hostfile", asked.hostfile, "--master_port", str(asked.master_port)]
    if asked.is_here_alone:
        return [*words, "--module", _RANKS_MODULE]
    words.append("--force_multi")
    address = asked.master_addr
    if (
        not address
        and len(asked.ssh) > 1
        and not any(contact_address(asked.hosts, entry.host, master_addr="") for entry in asked.hosts[1:2])
    ):
        # The launcher would ask the first host with the plain ssh; here it is known, from ssh as the user gave it.
        address = next(iter(first.addresses), "")
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
