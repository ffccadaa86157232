"""Which batches a rank builds, in order: for training without end, for evaluation once over the data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from clap_zero.data.batch import LoaderPlan
from clap_zero.data.partition import DataPosition, advance, micro_positions, settle


@dataclass(frozen=True)
class Work:
    """One batch to build: the places of its samples in the epoch, and which of them count."""

    position: DataPosition
    micro_index: int
    positions: np.ndarray
    valid: np.ndarray


def train_schedule(plan: LoaderPlan, num_samples: int) -> Iterator[Work]:
    """All micro batches of a rank, step after step, epoch after epoch, without end."""
    position = settle(plan.position, num_samples=num_samples, global_batch=plan.global_batch)
    valid = np.ones(plan.micro_batch, dtype=bool)
    while True:
        for micro_index in range(plan.accumulation):
            positions = micro_positions(
                position,
                rank=plan.rank,
                world_size=plan.world_size,
                micro_batch=plan.micro_batch,
                micro_index=micro_index,
            )
            yield Work(position, micro_index, positions, valid)
        position = advance(position, num_samples=num_samples, global_batch=plan.global_batch)


def eval_schedule(plan: LoaderPlan, num_samples: int) -> Iterator[Work]:
    """The batches of a rank in the natural order; equally many on all ranks, the excess repeats clips as invalid."""
    start = DataPosition()
    for number in range(num_eval_batches(plan, num_samples)):
        positions = micro_positions(
            start, rank=plan.rank, world_size=plan.world_size, micro_batch=plan.micro_batch, micro_index=number
        )
        yield Work(start, number, positions % num_samples, positions < num_samples)


def num_eval_batches(plan: LoaderPlan, num_samples: int) -> int:
    """Batches that each rank yields for one evaluation."""
    return -(-num_samples // (plan.micro_batch * plan.world_size))
