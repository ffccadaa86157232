"""How long a rank works on a step by itself: what the other ranks wait for when it is slow.

Wall time tells nothing here, since all ranks leave a step together. On CPU the main thread's clock stands still while
it waits in a collective. A GPU's clock does not tell waiting from work, so there only what holds no collective counts:
the forwards (below ZeRO stage 3), by events on the device, and the waits for data.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch

from clap_zero import phases

OWN_PHASES = ("data", "forward", "backward", "optimizer", "metrics")
"""What is told apart. `metrics` is what the hooks did since the step before."""

_BY_WALL = ("data", "metrics")
"""Phases that wait for disks and networks, but for no rank."""


class DeviceTimer:
    """Time that a GPU spends within blocks, summed up. Costs two events a block, and no synchronisation."""

    def __init__(self, *, on_device: bool) -> None:
        """Args:
        on_device: Whether there is a GPU, and the blocks hold no collective; else nothing is measured.
        """
        self.on_device = on_device
        self._events: list[tuple[Any, Any]] = []

    def __enter__(self) -> None:
        if self.on_device:
            pair = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            pair[0].record()
            self._events.append(pair)

    def __exit__(self, *_: object) -> None:
        if self.on_device:
            self._events[-1][1].record()

    def take(self) -> float:
        """Seconds of the blocks since the last call. The device must be done with them."""
        events, self._events = self._events, []
        return sum(start.elapsed_time(end) for start, end in events) * 1e-3


class OwnTime:
    """Seconds since the ranks last met, by phase, without this rank's waits for others."""

    def __init__(self, forward_timer: DeviceTimer, *, on_gpu: bool) -> None:
        """Args:
        forward_timer: Measures forwards on a GPU.
        on_gpu: Whether the rank computes on one.
        """
        self._forward_timer, self._on_gpu = forward_timer, on_gpu
        self._before: dict[str, float] | None = None

    def begin(self) -> None:
        """At the start of a step; only the first counts."""
        if self._before is None:
            self.restart()

    def restart(self) -> None:
        """The ranks have just met."""
        self._before = self._now()

    def take(self) -> tuple[float, ...]:
        """Seconds since `restart`, in the order of OWN_PHASES. The device must be done with the step."""
        assert self._before is not None, "begin comes first"
        now = self._now()
        seconds = {name: now[name] - self._before[name] for name in OWN_PHASES}
        if self._on_gpu:
            seconds |= {"forward": self._forward_timer.take(), "backward": 0.0, "optimizer": 0.0}
        return tuple(seconds.values())

    @staticmethod
    def _now() -> dict[str, float]:
        spent, worked = phases.spent(), phases.worked()
        return {name: (spent if name in _BY_WALL else worked).get(name, 0.0) for name in OWN_PHASES}


def slowest_rank(own_s: Sequence[Sequence[float]], *, step_time_s: float) -> dict[str, Any]:
    """Which rank the others waited for in a step, and for which share of it.

    Args:
        own_s: Seconds by rank and phase.
        step_time_s: Wall time of the step.

    Returns:
        `slowest_rank` and `slowest_rank_share`; nothing in a job of one.
    """
    if len(own_s) < 2:
        return {}
    totals = [sum(phases_s) for phases_s in own_s]
    rank = max(range(len(totals)), key=totals.__getitem__)
    # The lower of the two in the middle: of two ranks the median is the other one.
    more_s = totals[rank] - statistics.median_low(totals)
    return {"slowest_rank": rank, "slowest_rank_share": round(min(1.0, more_s / max(step_time_s, 1e-9)), 4)}
