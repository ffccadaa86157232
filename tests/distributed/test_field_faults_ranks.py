"""Faults that take several ranks to show (the ids are those of the list of field faults)."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from clap_zero.audio.clips import FeatureConfig
from clap_zero.data.index import load_index
from clap_zero.data.loader import LoaderPlan, train_batches
from clap_zero.distributed.collectives import rank_and_size
from clap_zero.testing import run_distributed
from clap_zero.training.run_directory import read_jsonl
from tests.distributed.test_stages_agree import flags, train
from tests.unit.audio.sounds import encode
from tests.unit.data.shard_files import pair, write_tar


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.long), 2, pytest.param(3, marks=pytest.mark.long)])
def test_t01_ranks_take_equal_steps_to_the_end_of_the_epoch(tmp_path: Path, stage: int) -> None:
    """Shards of 40 and 64 samples, batch 8, one bad sample: 104 = 6 steps of 16 and a remainder of 8, left out."""
    members = [member for n in range(39) for member in pair(f"a{n:02d}", n)]
    write_tar(tmp_path / "train" / "0.tar", [*members, ("bad.flac", b"fLaC"), ("bad.txt", b"x")])
    write_tar(tmp_path / "train" / "1.tar", [member for n in range(64) for member in pair(f"b{n:02d}", 100 + n)])
    run_dir = tmp_path / "run"
    words = flags(tmp_path / "train", run_dir, preset="tiny", stage=stage, micro=8, **{"train.max_steps": "null"})
    words += ["--train.epochs", "1", "--data.workers", "2", "--data.log_keys", str(tmp_path / "keys")]
    run_distributed(train, 2, words, timeout_s=300)
    lines = [line for line in read_jsonl(run_dir / "metrics.jsonl") if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, 7)) and {line["epoch"] for line in lines} == {0}
    read = [list(read_jsonl(path)) for path in sorted((tmp_path / "keys").glob("rank*.jsonl"))]
    assert [len(rank) for rank in read] == [6, 6]
    assert all(len(line["keys"]) == 8 for rank in read for line in rank)
    keys = [key for rank in read for line in rank for key in line["keys"]]
    num_bad = sum(line.get("num_skipped", 0) for line in lines)
    assert num_bad <= 1 and len(set(keys)) == 96 - num_bad


def crop_starts(split: str, num_batches: int, workers: int, rank: int | None = None) -> list[list[list[int]]]:
    """Where each crop of a rank of two starts, by epoch and worker; a sample's value tells its place in the clip."""
    rank = rank_and_size()[0] if rank is None else rank
    plan = LoaderPlan(
        rank=rank, world_size=2, micro_batch=2, features=FeatureConfig("rand_trunc"), workers=workers, max_seconds=60.0
    )
    batches = train_batches(load_index([split]), plan=plan)
    starts: list[list[list[int]]] = [[[] for _ in range(4)] for _ in range(2)]
    for number, batch in enumerate(itertools.islice(batches, 2 * num_batches)):
        first = batch.clips.lengths.cumsum(0) - batch.clips.lengths
        starts[batch.position.epoch][number % 4] += batch.clips.samples[first].tolist()
    batches.close()
    return starts


def test_t10_crops_differ_over_ranks_workers_and_epochs(tmp_path: Path) -> None:
    """One clip of 60 s 64 times, 2 ranks x 4 workers, 2 epochs."""
    ramp = (np.arange(60 * 48_000) // 48).astype(np.float32) / 65_536  # a value every millisecond, below full scale
    clip = encode(ramp, "FLAC", subtype="PCM_16")
    members = [member for n in range(64) for member in ((f"k{n:02d}.flac", clip), (f"k{n:02d}.txt", b"x"))]
    write_tar(tmp_path / "train" / "0.tar", members)
    ranks = run_distributed(crop_starts, 2, str(tmp_path / "train"), 16, 4, timeout_s=120)
    lists = [tuple(worker) for rank in ranks for epoch in rank for worker in epoch]
    assert len(lists) == len(set(lists)) == 2 * 2 * 4 and {len(starts) for starts in lists} == {8}
    every = list(itertools.chain(*lists))
    # 25,000 values that a start can have: of 128 draws hardly any are equal.
    assert len(every) == 128 and len(set(every)) > 120 and max(every) - min(every) > 15_000
    assert [crop_starts(str(tmp_path / "train"), 16, 0, rank) for rank in range(2)] == ranks  # by the seed alone
