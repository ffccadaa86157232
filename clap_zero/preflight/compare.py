"""Which machine differs from the first one, and in what: one line for each difference. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from clap_zero.preflight.findings import Finding, Level
from clap_zero.preflight.machine import Facts
from clap_zero.preflight.versions import ABSENT, OTHERS, PACKAGES

MAX_SKEW_S = 2.0
"""Clocks farther apart spoil what is told by time: logs of several nodes, files' ages, certificates."""


Named = Sequence[tuple[str, Facts]]
"""What to call a machine, and its facts; several ranks of one machine are several entries."""


def compare(named: Named, *, computing: Named | None = None) -> Iterator[Finding]:
    """Every machine against the first, and its GPUs against the first that has some.

    Args:
        named: All machines.
        computing: Those on which ranks shall run; None: all. A head node need not have GPUs.
    """
    seen: set[str] = set()
    found = [one for name, facts in named[1:] for one in _differences(name, facts, *named[0])]
    for finding in [*found, *_other_gpus(named if computing is None else computing)]:
        if str(finding) not in seen:
            seen.add(str(finding))
            yield finding


def _differences(name: str, facts: Facts, reference_name: str, reference: Facts) -> Iterator[Finding]:
    def differs(what: str, there: str, expected: str, *, level: Level = "error", advice: str = "") -> Finding:
        text = f"{what} is {there}, expected {expected} as on {reference_name}"
        return Finding(level, text + (f": {advice}" if advice else ""), name)

    if _minor(facts.python) != _minor(reference.python):
        there, expected = (f"{one.python} ({one.executable})" for one in (facts, reference))
        yield differs("Python", there, expected, advice="make one environment, alike on all nodes")
    for package in (*PACKAGES, "cuda", "nccl", *OTHERS):
        there, expected = facts.versions.get(package, ABSENT), reference.versions.get(package, ABSENT)
        if there != expected:
            level: Level = "warning" if package in OTHERS else "error"
            yield differs(package, there, expected, level=level, advice=f"in the environment of {facts.executable}")
    if facts.code != reference.code:
        there, expected = (f"{one.code} (commit {one.commit or 'unknown'})" for one in (facts, reference))
        advice = "another checkout, or files changed in one: git status and git pull there"
        yield differs("the code of clap_zero", there, expected, advice=advice)
    elif facts.commit != reference.commit:
        yield differs("the commit", facts.commit or "unknown", reference.commit or "unknown", level="warning")


def _other_gpus(named: Named) -> Iterator[Finding]:
    kinds = [(name, ", ".join(sorted({str(gpu.get("name")) for gpu in facts.gpus}))) for name, facts in named]
    reference, expected = next(((name, kind) for name, kind in kinds if kind), ("", ""))
    for name, kind in kinds:
        if kind != expected:
            text = f"its kind of GPU is {kind or 'none'}, expected {expected} as on {reference}"
            yield Finding("warning" if kind else "error", text, name)


def clock_skew(named: Sequence[tuple[str, float]]) -> Iterator[Finding]:
    """Clocks that are apart.

    Args:
        named: What to call a machine, and how far its clock is ahead of the first one's, in seconds.
    """
    for name, ahead_s in named:
        if abs(ahead_s) > MAX_SKEW_S:
            side = "ahead of" if ahead_s > 0 else "behind"
            text = f"its clock is {abs(ahead_s):.1f} s {side} {named[0][0]}'s, expected: at most {MAX_SKEW_S:.0f} s"
            yield Finding("warning", f"{text} (run an NTP service on both)", name)


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]
