"""What starting cost, and which rank the others wait for."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Sequence

from clap_zero.training.hooks import Hook
from clap_zero.training.loop import Trainer
from clap_zero.training.own_time import OWN_PHASES
from clap_zero.training.say import say
from clap_zero.training.start_up import told_first_step
from clap_zero.training.step import StepResult

WINDOW = 20
"""Steps that are looked at together."""

MUCH_SLOWER = 1.3
"""Own time of a slow rank, as a multiple of the median rank's."""

WORTH_TELLING = 0.1
"""Share of the step that the slow rank costs at the least."""

STEPS_BETWEEN = 200
"""Steps for which nothing is said again."""

FIRST_STEPS = 2
"""Steps that start loaders and fill caches."""


class SpeedHook(Hook):
    """Names the rank that holds the others back, when it does for long. Rank 0 only: it has everyone's figures."""

    def __init__(self, hosts: Sequence[str], *, say: Callable[[str], None] = say) -> None:
        """Args:
        hosts: Name of the host by rank.
        say: Shows a line to people.
        """
        self._hosts, self._say = list(hosts), say
        self._latest: deque[StepResult] = deque(maxlen=WINDOW)
        self._num_seen = 0
        self._next_step = 0

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        self._num_seen += 1
        if self._num_seen == 1:
            self._say(told_first_step())
        if self._num_seen <= FIRST_STEPS or len(self._hosts) < 2:
            return
        self._latest.append(result)
        if len(self._latest) < WINDOW or result.step < self._next_step:
            return
        line = describe_slowest(self._latest, self._hosts)
        if line is not None:
            self._next_step = result.step + STEPS_BETWEEN
            self._say(line)


def describe_slowest(results: Sequence[StepResult], hosts: Sequence[str]) -> str | None:
    """The rank that costs the others much in these steps, as one line; None where there is none.

    Args:
        results: Some steps of at least two ranks.
        hosts: Name of the host by rank.
    """
    ranks = range(len(hosts))
    # The lower of the two in the middle: of two ranks the median is the other one.
    totals = [statistics.median_low(sum(result.own_s[rank]) for result in results) for rank in ranks]
    slow = max(ranks, key=totals.__getitem__)
    usual_s = statistics.median_low(totals)
    more_s = totals[slow] - usual_s
    share = more_s / max(statistics.median_low(result.step_time_s for result in results), 1e-9)
    if totals[slow] <= MUCH_SLOWER * usual_s or share <= WORTH_TELLING:
        return None
    more_by_phase = {}
    for number, name in enumerate(OWN_PHASES):
        medians = [statistics.median_low(result.own_s[rank][number] for result in results) for rank in ranks]
        more_by_phase[name] = medians[slow] - statistics.median_low(medians)
    worst = max(OWN_PHASES, key=more_by_phase.__getitem__)
    return (
        f"rank {slow} on {hosts[slow]} holds the others back: {totals[slow]:.3g} s of its own a step against "
        f"{usual_s:.3g} s in the median rank, {min(1.0, share):.0%} of the step; most of it in {worst} "
        f"(+{more_by_phase[worst]:.2g} s)"
    )
