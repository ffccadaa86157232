"""Ranks that read the same shards: equal steps, every sample once, whatever is bad on one of them."""

from __future__ import annotations

import itertools

import pytest

from clap_zero.audio.clips import FeatureConfig
from clap_zero.data.index import load_index
from clap_zero.data.loader import LoaderPlan, eval_batches, train_batches
from clap_zero.data.partition import steps_per_epoch
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
