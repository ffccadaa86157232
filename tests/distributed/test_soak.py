"""Hundreds of thousands of tiny samples through the same worker processes: their memory stays where it is."""

from __future__ import annotations

import io
import statistics
import tarfile
from pathlib import Path

import numpy as np
import psutil
import pytest
import soundfile

from clap_zero.audio.clips import FeatureConfig
from clap_zero.data.batch import LoaderPlan
from clap_zero.data.index import load_index
from clap_zero.data.loader import train_batches
from clap_zero.distributed.collectives import rank_and_size
from clap_zero.testing import run_distributed
from tests.distributed.fuzz_reading import workers

MICRO_BATCH, SHARD_SIZE = 32, 100
NUM_WORKERS = 2
WARM_UP = 0.2
"""Part of the run in which workers still fill what they keep: contents of shards, kernels, buffers."""


def write_tiny(directory: Path, num_shards: int) -> None:
    """WAVs of 2 ms. Every tenth sample has no caption, so that skipping is soaked, too."""
    directory.mkdir()
    rng = np.random.default_rng(0)
    for shard in range(num_shards):
        with tarfile.open(directory / f"{shard}.tar", "w") as tar:
            for number in range(SHARD_SIZE):
                file = io.BytesIO()
                soundfile.write(file, rng.uniform(-0.5, 0.5, 96).astype(np.float32), 48_000, format="WAV")
                text = b"" if number % 10 == 0 else b"noise number %d of shard %d" % (number, shard)
                for name, data in ((f"k{number}.wav", file.getvalue()), (f"k{number}.txt", text)):
                    info = tarfile.TarInfo(name)
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))


def soak(split: str, num_samples: int) -> tuple[int, list[list[int]], list[int]]:
    """Reads so many samples over all ranks.

    Returns:
        Samples skipped by this rank; resident bytes of each worker at a hundred moments; those of the rank itself.
    """
    rank, size = rank_and_size()
    index = load_index([split])
    plan = LoaderPlan(
        rank=rank,
        world_size=size,
        micro_batch=MICRO_BATCH,
        features=FeatureConfig("rand_trunc"),
        workers=NUM_WORKERS,
        max_bad_fraction=0.2,
    )
    batches = train_batches(index, plan=plan)
    num_batches = num_samples // plan.global_batch
    memory: list[list[int]] = []
    own: list[int] = []
    num_skipped = 0
    for number in range(num_batches):
        num_skipped += len(next(batches).skipped)
        if number % max(1, num_batches // 100) == 0:
            memory.append([worker.memory_info().rss for worker in workers()])
            own.append(psutil.Process().memory_info().rss)
    batches.close()
    return num_skipped, memory, own


def growth(sizes: list[int]) -> float:
    """The last tenth over the first tenth behind the warm-up."""
    kept = sizes[int(WARM_UP * len(sizes)) :]
    tenth = max(1, len(kept) // 10)
    return statistics.median(kept[-tenth:]) / statistics.median(kept[:tenth])


def check(tmp_path: Path, *, num_samples: int, num_shards: int) -> None:
    write_tiny(tmp_path / "train", num_shards)
    for num_skipped, memory, own in run_distributed(soak, 2, str(tmp_path / "train"), num_samples, timeout_s=1800):
        assert abs(num_skipped / (num_samples / 2) - 0.1) < 0.02
        sizes = [*zip(*memory, strict=True), own]
        assert len(sizes) == NUM_WORKERS + 1
        assert max(growth(list(one)) for one in sizes) < 1.05, [growth(list(one)) for one in sizes]


def test_memory_is_flat_over_eight_thousand_samples(tmp_path):
    check(tmp_path, num_samples=8_192, num_shards=40)


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_memory_is_flat_over_two_hundred_thousand_samples(tmp_path):
    check(tmp_path, num_samples=200_000, num_shards=400)
