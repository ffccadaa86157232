"""Ranks that read the same shards: equal steps, every sample once, whatever is bad on one of them."""

from __future__ import annotations

import itertools

import pytest

from clap_zero.audio.clips import FeatureConfig
from clap_zero.data.index import load_index
from clap_zero.data.loader import LoaderPlan, eval_batches, train_batches
from clap_zero.data.partition import DataPosition, advance, steps_per_epoch
from clap_zero.distributed.collectives import all_gather_objects, rank_and_size
from clap_zero.testing import run_distributed
from tests.unit.data.shard_files import pair, write_split, write_tar


def plan(**change) -> LoaderPlan:
    rank, size = rank_and_size()
    return LoaderPlan(rank=rank, world_size=size, features=FeatureConfig("rand_trunc"), **change)


def train_epoch(split: str, micro_batch: int, accumulation: int, workers: int):
    """Keys by step of one epoch, over all ranks, with a collective in each step: unequal steps would hang."""
    index = load_index([split])
    settings = plan(micro_batch=micro_batch, accumulation=accumulation, workers=workers)
    batches = train_batches(index, plan=settings)
    steps = []
    for _ in range(steps_per_epoch(index.num_samples, settings.global_batch)):
        taken = list(itertools.islice(batches, accumulation))
        assert {batch.position.epoch for batch in taken} == {0}
        everywhere = all_gather_objects([(key, batch.skipped) for batch in taken for key in batch.keys])
        steps.append([key for rank in everywhere for key, _ in rank])
    batches.close()
    return steps


def evaluate(split: str, workers: int):
    found = []
    for batch in eval_batches(load_index([split]), plan=plan(micro_batch=2, workers=workers)):
        found += all_gather_objects(batch.clip_ids[batch.valid].tolist())
    return sorted(itertools.chain(*found))


@pytest.mark.parametrize(
    ("sizes", "micro", "accumulation"), [([64], 8, 2), ([7, 5, 4], 2, 1), ([40, 64], 8, 1), ([5, 0, 3, 9], 3, 1)]
)
def test_s09_shards_fewer_than_ranks_times_workers(tmp_path, sizes, micro, accumulation):
    split = str(write_split(tmp_path / "train", sizes))
    results = run_distributed(train_epoch, 2, split, micro, accumulation, 2)
    assert results[0] == results[1]
    keys = [key for step in results[0] for key in step]
    batch = 2 * micro * accumulation
    assert len(keys) == len(set(keys)) == sum(sizes) // batch * batch


def test_a_bad_sample_on_one_rank_only(tmp_path):
    members = [m for n in range(15) for m in pair(f"s{n:04d}", n)] + [("x.flac", b"junk"), ("x.txt", b"x")]
    write_tar(tmp_path / "train" / "0.tar", members)
    results = run_distributed(train_epoch, 2, str(tmp_path / "train"), 2, 1, 0)
    keys = [key for step in results[0] for key in step]
    assert results[0] == results[1] and len(keys) == 16 and len(set(keys)) == 15


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_s09_seven_clips_are_counted_once_on_any_number_of_ranks(tmp_path, world_size):
    split = str(write_split(tmp_path / "test", [4, 3]))
    assert run_distributed(evaluate, world_size, split, 1) == [list(range(7))] * world_size


def walk(split: str, begin: DataPosition, micro_batch: int, workers: int, num_steps: int | None):
    """Keys of all ranks from a position on, to the end of the epoch or for some steps; where the run then stands."""
    index = load_index([split])
    settings = plan(micro_batch=micro_batch, workers=workers, position=begin)
    batches, position, keys = train_batches(index, plan=settings), begin, []
    while position.epoch == begin.epoch and num_steps != 0:
        batch = next(batches)
        assert batch.position == position
        keys += itertools.chain(*all_gather_objects(batch.keys))
        position = advance(position, num_samples=index.num_samples, global_batch=settings.global_batch)
        num_steps = None if num_steps is None else num_steps - 1
    batches.close()
    return keys, position


@pytest.mark.parametrize(
    ("before", "after"),
    [((2, 4, 1), (1, 4, 0)), ((1, 6, 0), (2, 3, 1)), ((2, 3, 0), (4, 2, 1)), ((2, 4, 2), (2, 4, 1))],
)
def test_an_epoch_that_goes_on_with_other_ranks_loses_and_repeats_nothing(tmp_path, before, after):
    """(ranks, micro batch, workers) of the first steps and of the rest; 64 samples, the remainder is below a batch."""
    split = str(write_split(tmp_path / "train", [30, 9, 25]))
    first, position = run_distributed(walk, before[0], split, DataPosition(), before[1], before[2], 3)[0]
    rest, end = run_distributed(walk, after[0], split, position, after[1], after[2], None)[0]
    assert end == DataPosition(1, 0) and len(first) == 3 * before[0] * before[1]
    assert len(set(first + rest)) == len(first) + len(rest) > 64 - after[0] * after[1]
