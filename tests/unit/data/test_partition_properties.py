"""Properties of the order over 10,000 random combinations of data, mixture, ranks, workers and a change of all of them.

Each combination is walked once; missing, repeated, order and equal steps are then looked at apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

import numpy as np
import pytest

from clap_zero.audio.clips import FeatureConfig
from clap_zero.data.batch import LoaderPlan
from clap_zero.data.mixture import Part, samples_per_epoch
from clap_zero.data.partition import DataPosition, EpochOrder, advance, settle, steps_per_epoch
from clap_zero.data.schedule import train_schedule

NUM_CASES = 10_000
WEIGHTS = (1, 1, 1, 0.3, 0.5, 0.7, 1.5, 2, 2.5, 3)
FEATURES = FeatureConfig("rand_trunc")


@dataclass(frozen=True)
class Shape:
    """How many read, and how much at a time."""

    world: int
    workers: int
    micro: int
    accumulation: int

    @property
    def batch(self) -> int:
        return self.world * self.micro * self.accumulation

    @classmethod
    def draw(cls, rng: np.random.Generator) -> Shape:
        world, micro, accumulation = (int(n) for n in rng.integers(1, (7, 4, 3)))
        return cls(world, int(rng.integers(0, 5)), micro, accumulation)


@dataclass
class Walk:
    """A combination, and what was read: from the start of an epoch, then from a checkpoint with another shape.

    Attributes:
        seen: (first epoch step, positions by rank in the order in which they are read) for each of the two shapes.
    """

    sizes: np.ndarray
    parts: tuple[Part, ...]
    weights: tuple[float, ...]
    seed: int
    epoch: int
    shuffle_shards: int
    shapes: tuple[Shape, Shape]
    steps: tuple[int, int]
    seen: tuple[list[np.ndarray], list[np.ndarray]]
    order: EpochOrder

    @property
    def num_samples(self) -> int:
        return sum(part.num_samples for part in self.parts)

    @property
    def of_first(self) -> int:
        """Samples that the first shape reads before the change."""
        return self.steps[0] * self.shapes[0].batch


def read(shape: Shape, position: DataPosition, num_samples: int, steps: int) -> list[np.ndarray]:
    """The positions that each rank reads in so many steps: its workers build its batches in turn.

    Returns:
        For each rank int64 (steps, accumulation, micro).
    """
    ranks = []
    for rank in range(shape.world):
        plan = LoaderPlan(
            rank=rank,
            world_size=shape.world,
            micro_batch=shape.micro,
            features=FEATURES,
            accumulation=shape.accumulation,
            position=position,
        )
        count, workers = steps * shape.accumulation, max(1, shape.workers)
        batches: list[np.ndarray] = [np.zeros(0, dtype=np.int64)] * count
        built = list(islice(train_schedule(plan, num_samples), count))
        for worker in range(workers):  # as the pipeline deals them out
            for number, work in zip(range(worker, count, workers), islice(built, worker, None, workers), strict=True):
                batches[number] = work.positions
        empty = np.zeros((0, shape.accumulation, shape.micro), dtype=np.int64)
        ranks.append(np.reshape(batches, (steps, shape.accumulation, shape.micro)) if count else empty)
    return ranks


def walk(rng: np.random.Generator) -> Walk:
    sizes, parts, weights = [], [], []
    for _ in range(rng.integers(1, 4)):
        own = rng.integers(0, 9, size=rng.integers(1, 6))
        own[rng.integers(len(own))] += 1
        weight = float(WEIGHTS[rng.integers(len(WEIGHTS))])
        parts.append(Part(len(sizes), len(own), samples_per_epoch(int(own.sum()), weight)))
        weights.append(weight)
        sizes += own.tolist()
    shapes = Shape.draw(rng), Shape.draw(rng)
    seed, epoch, shuffle_shards = int(rng.integers(1000)), int(rng.integers(6)), int(rng.integers(1, 6))
    total = sum(part.num_samples for part in parts)
    first = int(rng.integers(0, steps_per_epoch(total, shapes[0].batch) + 1))
    offset = first * shapes[0].batch
    second = (total - offset) // shapes[1].batch
    column = np.array(sizes)
    order = EpochOrder(column, seed=seed, epoch=epoch, shuffle_shards=shuffle_shards, parts=parts)
    seen = (
        read(shapes[0], DataPosition(epoch, 0), total, first),
        read(shapes[1], DataPosition(epoch, offset), total, second),
    )
    return Walk(column, tuple(parts), tuple(weights), seed, epoch, shuffle_shards, shapes, (first, second), seen, order)


@pytest.fixture(scope="module")
def walks() -> list[Walk]:
    rng = np.random.default_rng(20)
    return [walk(rng) for _ in range(NUM_CASES)]


def all_seen(case: Walk) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype=np.int64), *(ranks.ravel() for part in case.seen for ranks in part)])


def test_all_ranks_take_the_same_steps_also_with_fewer_shards_than_readers(walks):
    few = 0
    for case in walks:
        for shape, steps, ranks in zip(case.shapes, case.steps, case.seen, strict=True):
            assert [positions.shape for positions in ranks] == [(steps, shape.accumulation, shape.micro)] * shape.world
        few += len(case.sizes) < case.shapes[0].world * max(1, case.shapes[0].workers)
    assert few > 1000


def test_nothing_of_an_epoch_is_missing_but_the_remainder(walks):
    for case in walks:
        left_out = np.setdiff1d(np.arange(case.num_samples), all_seen(case))
        assert len(left_out) < case.shapes[1].batch
        # What is left out is the end of the sequence, nothing in its midst: also when the shape changed on the way.
        assert left_out.tolist() == list(range(case.num_samples - len(left_out), case.num_samples))


def test_nothing_of_an_epoch_is_repeated(walks):
    for case in walks:
        seen = all_seen(case)
        assert len(np.unique(seen)) == len(seen)
        assert len(seen) == 0 or seen.max() < case.num_samples


def test_a_set_of_weight_1_has_each_sample_once_in_each_epoch(walks):
    for case in walks:
        shards, samples = case.order.locate(np.arange(case.num_samples))
        for part, weight in zip(case.parts, case.weights, strict=True):
            own = (shards >= part.first_shard) & (shards < part.first_shard + part.num_shards)
            assert own.sum() == part.num_samples
            numbers = shards[own] * 100 + samples[own]
            stored = int(case.sizes[part.first_shard : part.first_shard + part.num_shards].sum())
            assert (samples[own] < case.sizes[shards[own]]).all() and (samples[own] >= 0).all()
            if weight == 1:
                assert len(np.unique(numbers)) == len(numbers) == stored
            if weight in (2, 3):
                _, counts = np.unique(numbers, return_counts=True)
                assert (counts == weight).all() and len(counts) == stored


def test_the_order_is_that_of_the_epoch_whatever_the_shape(walks):
    for case in walks:
        start = 0
        for shape, steps, ranks in zip(case.shapes, case.steps, case.seen, strict=True):
            # Step after step, micro batch after micro batch, rank after rank: one sequence without a gap.
            sequence = np.stack(ranks, axis=2).ravel()
            assert sequence.tolist() == list(range(start, start + steps * shape.batch))
            start += steps * shape.batch


def test_the_order_is_a_function_of_seed_and_epoch(walks):
    differ = 0
    for case in walks[:2000]:
        places = np.arange(case.num_samples)
        sequence = np.stack(case.order.locate(places))
        given = {"seed": case.seed, "epoch": case.epoch, "shuffle_shards": case.shuffle_shards, "parts": case.parts}
        again = EpochOrder(case.sizes, **given)
        backwards = np.stack(again.locate(places[::-1]))[:, ::-1]
        assert np.array_equal(sequence, backwards)
        for change in ({"epoch": case.epoch + 1}, {"seed": case.seed + 1}):
            other = np.stack(EpochOrder(case.sizes, **{**given, **change}).locate(places))
            differ += not np.array_equal(sequence, other)
    assert differ > 0.97 * 2 * 2000  # some have only one or two samples


def test_a_run_goes_on_into_the_next_epoch(walks):
    for case in walks[:2000]:
        shape = case.shapes[1]
        if shape.batch > case.num_samples:
            continue
        position = settle(
            DataPosition(case.epoch, case.of_first), num_samples=case.num_samples, global_batch=shape.batch
        )
        for _ in range(case.steps[1]):
            assert position.epoch == case.epoch
            position = advance(position, num_samples=case.num_samples, global_batch=shape.batch)
        assert position == DataPosition(case.epoch + 1, 0)
