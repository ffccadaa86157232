"""The checks that ranks make together at the start of each run: is everybody the same, and does every number arrive?

As a program of its own, without a run: `deepspeed --hostfile hostfile -m clap_zero.preflight.ranks`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from statistics import median

import torch

from clap_zero.distributed import collectives
from clap_zero.distributed.world import World, init_distributed, memory_bytes, set_cpu_threads, teardown
from clap_zero.errors import ClapZeroError
from clap_zero.launching.entry import given
from clap_zero.preflight.compare import clock_skew, compare
from clap_zero.preflight.findings import Finding, errors_of, notes_of
from clap_zero.preflight.links import Link, measure_link
from clap_zero.preflight.machine import Facts, check_build_locks, check_limits, check_temporary, facts_here
from clap_zero.preflight.shared import raise_together, rank_name
from clap_zero.preflight.space import check_shared_memory, told_bytes
from clap_zero.preflight.table import ranges, table, told_rate
from clap_zero.preflight.versions import known_bad

SHOWN_RANKS = 16
"""More ranks than this are told host by host."""
_BUSY_SHARE = 0.1


@dataclass(frozen=True)
class RankReport:
    """What one rank has to say.

    Attributes:
        name: `rank 3 on node7`.
        facts: Of its machine.
        clock: Seconds since the epoch, taken when all ranks had met.
        device: What it computes on.
        memory_bytes: That it may fill.
        threads: That it computes with.
        link: What it saw of the network; None alone.
        findings: Of its own checks.
    """

    name: str
    facts: Facts
    clock: float
    device: str
    memory_bytes: int
    threads: int
    link: Link | None
    findings: tuple[Finding, ...]


def check_ranks(world: World) -> list[str]:
    """Versions, code, clocks, limits and links of all ranks.

    Collective: all ranks must call.

    Returns:
        What is worth telling: the table of ranks, the links, warnings.

    Raises:
        LaunchError: Something that would spoil the run, one line each. On all ranks; rank 0 reports it.
    """
    facts = facts_here()
    name = rank_name(world)
    # Once a host: all its ranks would see the same.
    findings = [*check_limits(), *_check_device(world)]
    if world.local_rank == 0:
        findings += [*known_bad(facts.versions), *check_shared_memory(), *check_build_locks(), *check_temporary()]
    threads = set_cpu_threads(world)
    collectives.barrier()
    report = RankReport(
        name=name,
        facts=facts,
        clock=time.time(),
        device=_device_name(world),
        memory_bytes=memory_bytes(world),
        threads=threads,
        link=measure_link(world),
        findings=tuple(Finding(one.level, one.text, name) for one in findings),
    )
    reports = collectives.all_gather_objects(report)
    every = _judge(reports)
    raise_together(errors_of(every), world)
    return [*_told_ranks(reports), *notes_of(every)]


def _judge(reports: list[RankReport]) -> list[Finding]:
    named = [(report.name, report.facts) for report in reports]
    found = [*(one for report in reports for one in report.findings), *compare(_one_a_host(named))]
    found += clock_skew([(report.name, report.clock - reports[0].clock) for report in _first_of_hosts(reports)])
    return found + _judge_links(reports)


def _judge_links(reports: list[RankReport]) -> list[Finding]:
    found = []
    for report in reports:
        if report.link is not None and report.link.wrong_from >= 0:
            sender = reports[report.link.wrong_from].name
            found.append(
                Finding(
                    "error",
                    f"known numbers from {sender} arrived wrong: the network, a GPU or its memory is broken; leave one "
                    "of the two nodes out",
                    report.name,
                )
            )
        elif report.link is not None and report.link.wrong_sum:
            found.append(Finding("error", "an all-reduce of known numbers gave a wrong sum", report.name))
    return found


def _one_a_host(named: list[tuple[str, Facts]]) -> list[tuple[str, Facts]]:
    """Ranks of one host that are alike count once; one that differs from its neighbours stays."""
    seen: dict[str, tuple[str, Facts]] = {}
    for name, facts in named:
        key = repr((facts.host, facts.executable, facts.python, sorted(facts.versions.items()), facts.code))
        seen.setdefault(key, (name, facts))
    return list(seen.values())


def _first_of_hosts(reports: list[RankReport]) -> list[RankReport]:
    first: dict[str, RankReport] = {}
    for report in reports:
        first.setdefault(report.facts.host, report)
    return list(first.values())


def _told_ranks(reports: list[RankReport]) -> list[str]:
    """The table, and the links in one line."""
    groups: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for rank, report in enumerate(reports):
        alike = (report.facts.host, report.device, told_bytes(report.memory_bytes), str(report.threads))
        groups[alike if len(reports) > SHOWN_RANKS else (*alike, str(rank))].append(rank)
    rows = []
    for key, ranks in groups.items():
        links = [link.from_previous_hz for rank in ranks if (link := reports[rank].link) is not None]
        rows.append((ranges(ranks), *key[:4], told_rate(min(links)) if links else "-"))
    lines = table(("rank", "host", "device", "memory", "threads", "from the rank before"), rows)
    every = [report.link for report in reports if report.link is not None]
    if every:
        reduced, gathered = (
            median([getattr(link, name) for link in every]) for name in ("all_reduce_hz", "all_gather_hz")
        )
        lines.append(
            f"known numbers arrived exactly on {len(every)} ranks: all-reduce {told_rate(reduced)}, all-gather "
            f"{told_rate(gathered)}"
        )
    tf32 = torch.backends.cuda.matmul.allow_tf32
    if any(report.device != "cpu" for report in reports):
        lines.append(f"TF32 in matrix products: {'on' if tf32 else 'off'}")
    return lines


def _check_device(world: World) -> list[Finding]:
    """Whether others use this rank's GPU; on one of its own only its driver and this process have memory."""
    if world.device.type != "cuda":
        return []
    free, total = torch.cuda.mem_get_info(world.device)
    used = total - free - torch.cuda.memory_reserved(world.device)
    if used < _BUSY_SHARE * total:
        return []
    text = (
        f"{world.device} is busy: other processes hold {told_bytes(used)} of {told_bytes(total)}; nvidia-smi shows them"
    )
    return [Finding("warning", text)]


def _device_name(world: World) -> str:
    return torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else world.device.type


def main() -> int:
    """All checks of ranks that no run is needed for, and their table."""
    parser = argparse.ArgumentParser(prog="python -m clap_zero.preflight.ranks", description=main.__doc__)
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)  # the launcher's
    parser.add_argument("--timeout_s", type=float, default=120.0, help="longest wait for another rank, s")
    args = parser.parse_args(given())
    world = None
    try:
        world = init_distributed(timeout_s=args.timeout_s)
        lines = check_ranks(world)
    except ClapZeroError as error:
        if not error.reported_elsewhere:
            for line in str(error).splitlines():
                print(f"clap_zero: error: {line}", file=sys.stderr, flush=True)
        return error.exit_code
    if world.is_main:
        print("\n".join(lines), flush=True)
    teardown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
