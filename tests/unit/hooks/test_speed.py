"""The rank that holds the others back is named when it costs much, for long, and not too often."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from clap_zero.hooks.speed import FIRST_STEPS, STEPS_BETWEEN, WINDOW, SpeedHook, describe_slowest
from clap_zero.training.own_time import slowest_rank

HOSTS = ["node1", "node1", "node2", "node2"]


def result(step: int, own_s: list[tuple[float, ...]], step_time_s: float = 1.0) -> Any:
    return SimpleNamespace(step=step, own_s=tuple(own_s), step_time_s=step_time_s)


def ranks(slow: tuple[float, ...] | None = None, *, number: int = 4) -> list[tuple[float, ...]]:
    usual = (0.1, 0.2, 0.2, 0.1, 0.0)
    return [slow if slow is not None and rank == number - 2 else usual for rank in range(number)]


def test_the_slow_rank_is_named_with_its_host_its_cost_and_its_phase() -> None:
    line = describe_slowest([result(step, ranks((0.1, 0.2, 0.6, 0.1, 0.0))) for step in range(WINDOW)], HOSTS)
    assert line == (
        "rank 2 on node2 holds the others back: 1 s of its own a step against 0.6 s in the median rank, 40% of the "
        "step; most of it in backward (+0.4 s)"
    )


def test_of_two_ranks_the_slow_one_is_named() -> None:
    two = [result(step, ranks((0.5, 0.2, 0.2, 0.1, 0.0), number=2)) for step in range(WINDOW)]
    line = describe_slowest(two, HOSTS[:2])
    assert line is not None and line.startswith("rank 0 on node1") and "in data (+0.4 s)" in line


@pytest.mark.parametrize(
    ("slow", "step_time_s"),
    [
        (None, 1.0),
        ((0.1, 0.2, 0.35, 0.1, 0.0), 1.0),  # less than 1.3 times the others
        ((0.1, 0.2, 0.6, 0.1, 0.0), 5.0),  # less than a tenth of the step
    ],
)
def test_what_costs_little_is_not_told(slow: tuple[float, ...] | None, step_time_s: float) -> None:
    assert describe_slowest([result(step, ranks(slow), step_time_s) for step in range(WINDOW)], HOSTS) is None


def test_a_single_slow_step_is_not_told() -> None:
    steps = [result(step, ranks((9.0, 0, 0, 0, 0) if step == 3 else None)) for step in range(WINDOW)]
    assert describe_slowest(steps, HOSTS) is None


def test_it_is_told_once_in_a_while() -> None:
    lines: list[str] = []
    hook = SpeedHook(HOSTS, say=lines.append)
    told_at = []
    for step in range(1, 300):
        before = len(lines)
        hook.on_step(SimpleNamespace(), result(step, ranks((0.1, 0.2, 0.6, 0.1, 0.0))))  # type: ignore[arg-type]
        if len(lines) > before:
            told_at.append(step)
    assert told_at == [1, WINDOW + FIRST_STEPS, WINDOW + FIRST_STEPS + STEPS_BETWEEN]
    assert lines[0].startswith("first step after ")


def test_the_line_of_a_step_has_the_slowest_rank_and_what_it_cost() -> None:
    assert slowest_rank(ranks((0.1, 0.2, 0.6, 0.1, 0.0)), step_time_s=2.0) == {
        "slowest_rank": 2,
        "slowest_rank_share": pytest.approx(0.2),
    }
    assert slowest_rank(ranks(number=1), step_time_s=1.0) == {}
