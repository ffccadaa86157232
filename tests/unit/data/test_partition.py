from __future__ import annotations

import time
import tracemalloc

import numpy as np
import pytest

from clap_zero.data.partition import (
    DataPosition,
    EpochOrder,
    advance,
    micro_positions,
    sample_generator,
    settle,
    steps_per_epoch,
)


def random_sizes(rng: np.random.Generator) -> np.ndarray:
    sizes = rng.integers(0, 12, size=rng.integers(1, 9))
    sizes[rng.integers(len(sizes))] += 1
    return sizes


def step_samples(
    order: EpochOrder, position: DataPosition, world: int, micro: int, accumulation: int
) -> list[list[int]]:
    """The samples that each rank reads in a step, as global numbers."""
    ranks = []
    for rank in range(world):
        places = [
            micro_positions(position, rank=rank, world_size=world, micro_batch=micro, micro_index=index)
            for index in range(accumulation)
        ]
        shards, samples = order.locate(np.concatenate(places))
        ranks.append([int(shard) * 1000 + int(sample) for shard, sample in zip(shards, samples, strict=True)])
    return ranks


def everything(sizes: np.ndarray) -> set[int]:
    return {shard * 1000 + sample for shard, size in enumerate(sizes) for sample in range(size)}


def test_each_sample_once_and_equal_steps_for_random_combinations():
    rng = np.random.default_rng(0)
    for _ in range(1500):
        sizes = random_sizes(rng)
        world, micro, accumulation = (int(n) for n in rng.integers(1, 5, size=3))
        seed, epoch, mixed = int(rng.integers(5)), int(rng.integers(3)), int(rng.integers(1, 6))
        total, batch = int(sizes.sum()), world * micro * accumulation
        steps = steps_per_epoch(total, batch)
        order = EpochOrder(sizes, seed=seed, epoch=epoch, shuffle_shards=mixed)
        seen: list[int] = []
        position = DataPosition(epoch, 0)
        for _step in range(steps):
            ranks = step_samples(order, position, world, micro, accumulation)
            assert {len(samples) for samples in ranks} == {micro * accumulation}
            seen += [sample for samples in ranks for sample in samples]
            assert position.epoch == epoch
            position = advance(position, num_samples=total, global_batch=batch)
        assert len(seen) == len(set(seen)) == steps * batch
        assert set(seen) <= everything(sizes)
        assert total - len(seen) < batch  # the remainder
        if steps:
            assert position == DataPosition(epoch + 1, 0)


def test_other_ranks_batches_and_accumulation_go_on_without_loss_or_repeat():
    rng = np.random.default_rng(1)
    for _ in range(1500):
        sizes = random_sizes(rng)
        total = int(sizes.sum())
        order = EpochOrder(sizes, seed=3, epoch=0, shuffle_shards=2)
        position, seen = DataPosition(), []
        while True:  # another shape at each step
            world, micro, accumulation = (int(n) for n in rng.integers(1, 4, size=3))
            batch = world * micro * accumulation
            if position.offset + batch > total:
                break
            seen += [s for samples in step_samples(order, position, world, micro, accumulation) for s in samples]
            position = DataPosition(0, position.offset + batch)
        assert len(seen) == len(set(seen)) == position.offset
        whole = order.locate(np.arange(total))
        sequence = [int(a) * 1000 + int(b) for a, b in zip(*whole, strict=True)]
        # What a step sees is a slice of the sequence, whatever the shape was.
        assert set(seen) == set(sequence[: len(seen)])
        assert set(sequence) == everything(sizes)


def test_a_step_is_the_same_set_for_every_shape_of_a_global_batch():
    order = EpochOrder(np.array([30, 50, 20]), seed=0, epoch=0, shuffle_shards=2)
    shapes = [(1, 24, 1), (2, 12, 1), (3, 4, 2), (4, 2, 3), (1, 1, 24)]
    sets = [sorted(s for rank in step_samples(order, DataPosition(0, 24), *shape) for s in rank) for shape in shapes]
    assert all(found == sets[0] for found in sets)


def test_order_depends_on_seed_and_epoch_only():
    sizes = np.array([40, 40, 40, 40])

    def sequence(**change) -> list[int]:
        order = EpochOrder(sizes, **{"seed": 1, "epoch": 0, "shuffle_shards": 2, **change})
        shards, samples = order.locate(np.arange(160))
        return (shards * 1000 + samples).tolist()

    assert sequence() == sequence()
    assert sequence() != sequence(epoch=1)
    assert sequence() != sequence(seed=2)
    one_by_one = EpochOrder(sizes, seed=1, epoch=0, shuffle_shards=2)
    backwards = [one_by_one.locate(np.array([place])) for place in reversed(range(160))]
    assert [int(shard[0]) * 1000 + int(sample[0]) for shard, sample in reversed(backwards)] == sequence()


def test_samples_of_a_single_shard_come_in_another_order_each_epoch():
    orders = [EpochOrder(np.array([50]), seed=0, epoch=epoch).locate(np.arange(50))[1].tolist() for epoch in range(3)]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert all(sorted(order) == list(range(50)) for order in orders)


def test_shards_are_mixed():
    order = EpochOrder(np.full(32, 64), seed=0, epoch=0, shuffle_shards=16)
    shards, _ = order.locate(np.arange(64))
    assert len(set(shards.tolist())) >= 10
    first_block, _ = order.locate(np.arange(16 * 64))
    assert len(set(first_block.tolist())) == 16


def test_natural_order_without_shuffle():
    order = EpochOrder(np.array([2, 0, 3]), seed=0, epoch=0, shuffle=False)
    shards, samples = order.locate(np.arange(5))
    assert shards.tolist() == [0, 0, 2, 2, 2] and samples.tolist() == [0, 1, 0, 1, 2]


def test_settle_and_advance():
    assert settle(DataPosition(2, 90), num_samples=100, global_batch=10) == DataPosition(2, 90)
    assert settle(DataPosition(2, 90), num_samples=100, global_batch=11) == DataPosition(3, 0)
    assert advance(DataPosition(0, 0), num_samples=100, global_batch=30) == DataPosition(0, 30)
    assert advance(DataPosition(0, 60), num_samples=100, global_batch=30) == DataPosition(1, 0)
    assert advance(DataPosition(0, 95), num_samples=100, global_batch=30) == DataPosition(1, 30)
    assert advance(DataPosition(0, 0), num_samples=30, global_batch=30) == DataPosition(1, 0)


def test_replacements_stay_in_the_epoch_and_repeat_themselves():
    order = EpochOrder(np.full(10, 7), seed=0, epoch=4, shuffle_shards=2)
    again = EpochOrder(np.full(10, 7), seed=0, epoch=4, shuffle_shards=2)
    for position in range(70):
        places = [order.replacement(position, attempt) for attempt in range(1, 30)]
        assert places == [again.replacement(position, attempt) for attempt in range(1, 30)]
        assert all(0 <= place < 70 for place in places)
        assert all(place // 14 == position // 14 for place in places[:4])  # in its own block of two shards
        assert len(set(places)) > 10


def test_sample_generator_differs_by_each_part():
    base = {"epoch": 0, "position": 5, "attempt": 0, "purpose": 0}

    def draw(seed: int = 0, **change) -> float:
        return sample_generator(seed, **{**base, **change}).random()

    others = [draw(1), draw(-1), draw(epoch=1), draw(position=6), draw(attempt=1), draw(purpose=1)]
    assert draw() == draw()
    assert len({draw(), *others}) == 7


def test_a_million_shards_in_little_time_and_memory():
    sizes = np.full(1_000_000, 512)
    tracemalloc.start()
    start = time.process_time()
    order = EpochOrder(sizes, seed=0, epoch=0, shuffle_shards=16)
    total = order.num_samples
    for place in range(0, total, total // 100):
        order.locate(np.arange(place, min(place + 64, total)))
    elapsed = time.process_time() - start
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert total == 512_000_000
    assert elapsed < 5
    assert peak < 80e6


@pytest.mark.parametrize("shuffle_shards", [1, 3, 16, 1000])
def test_blocks_of_any_size_hold_every_sample(shuffle_shards):
    sizes = np.array([5, 0, 1, 9, 3, 0, 4])
    order = EpochOrder(sizes, seed=0, epoch=0, shuffle_shards=shuffle_shards)
    shards, samples = order.locate(np.arange(22))
    assert {int(a) * 1000 + int(b) for a, b in zip(shards, samples, strict=True)} == everything(sizes)
