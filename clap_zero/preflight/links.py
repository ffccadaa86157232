"""Collectives over known numbers: whether every rank gets exactly what it should, and how fast.

The numbers are whole and small, so that their sums are exact in fp32 and one wrong bit shows.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from clap_zero.distributed import collectives
from clap_zero.distributed.ring import pass_on
from clap_zero.distributed.world import World

CPU_BYTES = 1 << 20
GPU_BYTES = 64 << 20
"""What a rank puts in. Over 1 Gbit/s a MiB takes 9 ms; a GPU needs more to be measured at all."""
_PERIOD = 1021
"""Prime, so that numbers that moved by any usual block size do not look right."""


@dataclass(frozen=True)
class Link:
    """What one rank saw.

    Attributes:
        all_reduce_hz: Bytes a second through the busiest link, 2 (n - 1) / n of the tensor by the ring's count
            (Patarasuk and Yuan 2009).
        all_gather_hz: The same, (n - 1) / n of the result.
        from_previous_hz: Bytes a second that came from the rank before this one, all ranks sending at once.
        wrong_from: The rank whose numbers came wrong here; -1: none.
        wrong_sum: Whether the all-reduce gave a wrong sum.
    """

    all_reduce_hz: float
    all_gather_hz: float
    from_previous_hz: float
    wrong_from: int
    wrong_sum: bool


def known_numbers(rank: int, count: int, device: torch.device) -> Tensor:
    """(count,) fp32: whole numbers below 1021 + 7 that are another rank's nowhere, in a fixed pattern."""
    return ((torch.arange(count, device=device) + 37 * rank) % _PERIOD + rank % 7).float()


def measure_link(world: World) -> Link | None:
    """Runs the collectives of a training step over known numbers.

    Collective: all ranks must call.

    Returns:
        What this rank saw; None in a job of one rank.
    """
    if world.size == 1:
        return None
    num_bytes = CPU_BYTES if world.device.type == "cpu" else GPU_BYTES
    # The all-gather's result is `size` times as large: in a job of many ranks each puts in less.
    count = max(_PERIOD, num_bytes // 4 // max(1, world.size // 8))
    mine = known_numbers(world.rank, count, world.device)
    pass_on(collectives.all_reduce_sum(collectives.all_gather(mine[:8])))  # connections are made at first use
    started = _now(world.device)
    total = collectives.all_reduce_sum(mine)
    reduced = _now(world.device)
    gathered = collectives.all_gather(mine)
    all_gathered = _now(world.device)
    previous = pass_on(mine)
    passed = _now(world.device)
    wrong_from, expected_sum = -1, torch.zeros_like(mine)
    for rank, part in enumerate(gathered.split(count)):
        expected = known_numbers(rank, count, world.device)
        expected_sum += expected
        if not torch.equal(part, expected):
            wrong_from = rank
    before = (world.rank - 1) % world.size
    if not torch.equal(previous, known_numbers(before, count, world.device)):
        wrong_from = before
    share = (world.size - 1) / world.size
    return Link(
        all_reduce_hz=2 * share * 4 * count / (reduced - started),
        all_gather_hz=share * 4 * count * world.size / (all_gathered - reduced),
        from_previous_hz=4 * count / (passed - all_gathered),
        wrong_from=wrong_from,
        wrong_sum=not torch.equal(total, expected_sum),
    )


def _now(device: torch.device) -> float:
    """Seconds, once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
