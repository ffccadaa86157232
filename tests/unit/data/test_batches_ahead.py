"""How many batches workers prepare ahead for steps that draw several at once."""

from __future__ import annotations

import pytest

from clap_zero.audio.clips import FeatureConfig
from clap_zero.data.batch import AHEAD_BYTES, LoaderPlan, batches_ahead


@pytest.mark.parametrize(("accumulation", "workers", "ahead"), [(2, 8, 2), (24, 8, 4), (25, 8, 5), (32, 1, 33)])
def test_the_next_step_is_ready_when_it_is_drawn(accumulation: int, workers: int, ahead: int) -> None:
    features = FeatureConfig("rand_trunc")
    got = batches_ahead(features, micro_batch=16, accumulation=accumulation, workers=workers, max_seconds=60.0)
    assert got == ahead and (got * workers >= accumulation)


@pytest.mark.parametrize(("truncation", "clip_bytes"), [("rand_trunc", 960_000), ("fusion", 5_760_000)])
def test_memory_bounds_them(truncation: str, clip_bytes: int) -> None:
    features = FeatureConfig(truncation)  # type: ignore[arg-type]
    got = batches_ahead(features, micro_batch=32, accumulation=4096, workers=4, max_seconds=60.0)
    assert got * 4 * 32 * clip_bytes <= AHEAD_BYTES < (got + 1) * 4 * 32 * clip_bytes


def test_never_fewer_than_usual() -> None:
    features = FeatureConfig("fusion")
    for workers in (0, 8):
        got = batches_ahead(features, micro_batch=4096, accumulation=64, workers=workers, max_seconds=60.0)
        assert got == LoaderPlan.prefetch
