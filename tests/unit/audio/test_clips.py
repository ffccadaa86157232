"""Feature configs, crop plans and clip batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from clap_zero.audio.features import ClipBatch, FeatureConfig, plan_crop
from clap_zero.errors import ConfigError


def test_rand_trunc_starts_cover_all_positions_and_evaluation_takes_the_centre():
    cfg = FeatureConfig("rand_trunc")
    rng = np.random.default_rng(0)
    plans = [plan_crop(480_003, cfg, rng) for _ in range(200)]
    assert {plan.start_sample for plan in plans} == {0, 1, 2, 3}
    assert {plan.num_samples for plan in plans} == {480_000}
    assert plan_crop(500_000, cfg, None).start_sample == 10_000
    assert plan_crop(500_000, cfg, None) == plan_crop(500_000, cfg, None)
    assert plan_crop(7, cfg, rng) == plan_crop(7, cfg, None)


@pytest.mark.parametrize("num_frames", [1002, 1003, 1004, 1005, 1010, 6001])
def test_fusion_starts_come_from_the_extractors_thirds(num_frames):
    cfg, rng = FeatureConfig("fusion"), np.random.default_rng(0)
    num_samples = (num_frames - 1) * 480
    thirds = [set(third.tolist()) or {0} for third in np.array_split(np.arange(num_frames - 1001 + 1), 3)]
    drawn = [plan_crop(num_samples, cfg, rng) for _ in range(300)]
    for i, third in enumerate(thirds):
        starts = {plan.chunk_starts[i] for plan in drawn}
        assert starts <= third and (len(third) > 20 or starts == third)
    middle = plan_crop(num_samples, cfg, None)
    assert all(start in third for start, third in zip(middle.chunk_starts, thirds, strict=True))
    assert (middle.start_sample, middle.num_samples) == (0, num_samples)


def test_training_draws_come_from_the_generator_alone():
    cfg = FeatureConfig("fusion")
    a, b = (plan_crop(2_000_000, cfg, np.random.default_rng(5)) for _ in range(2))
    assert a == b != plan_crop(2_000_000, cfg, np.random.default_rng(6))


def test_a_preprocessor_config_is_read_and_written():
    laion = {"feature_extractor_type": "ClapFeatureExtractor", "frequency_min": 50, "truncation": "rand_trunc"}
    laion |= {"feature_size": 64, "nb_max_samples": 480_000, "top_db": None, "padding": "repeatpad"}
    assert FeatureConfig.from_preprocessor(laion) == FeatureConfig("rand_trunc")
    assert FeatureConfig.from_preprocessor({}) == FeatureConfig("fusion", f_min=0.0)
    cfg = FeatureConfig("fusion", max_samples=48_000, f_min=20.0)
    assert FeatureConfig.from_preprocessor(cfg.to_preprocessor()) == cfg


def test_the_written_config_makes_the_extractor(tmp_path):
    import json

    from transformers import ClapFeatureExtractor

    cfg = FeatureConfig("rand_trunc")
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(cfg.to_preprocessor()))
    extractor = ClapFeatureExtractor.from_pretrained(tmp_path)
    assert (extractor.truncation, extractor.nb_max_samples, extractor.frequency_min) == ("rand_trunc", 480_000, 50)
    assert FeatureConfig.from_preprocessor(extractor.to_dict()) == cfg


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"padding": "repeat"}, "repeat"),
        ({"padding": "pad"}, "pad"),
        ({"truncation": "rand_fusion"}, "rand_fusion"),
        ({"feature_extractor_type": "WhisperFeatureExtractor"}, "Whisper"),
        ({"hop_length": 0}, "hop=0"),
        ({"hop_length": 513}, "hop 513"),
        ({"max_length_s": 9.5}, "whole seconds"),
        ({"nb_max_samples": 480_001}, "whole seconds"),
        ({"frequency_max": 30_000}, "f_max"),
        ({"feature_size": "many"}, "many"),
    ],
)
def test_what_is_not_supported_is_refused(wrong, named):
    with pytest.raises(ConfigError, match=named):
        FeatureConfig.from_preprocessor(wrong)


def test_a_batch_keeps_lengths_and_order():
    clips = [np.full(n, i, dtype=np.float32) for i, n in enumerate((3, 5, 2))]
    batch = ClipBatch.from_clips(clips, FeatureConfig("fusion"), as_int16=False)
    assert batch.lengths.tolist() == [3, 5, 2] and len(batch) == 3 and batch.chunk_starts.shape == (3, 3)
    assert batch.samples.tolist() == [0] * 3 + [1] * 5 + [2] * 2
    assert ClipBatch.from_clips(clips, FeatureConfig("fusion")).samples.dtype == torch.int16
    moved = batch.to("meta")
    assert moved.samples.device.type == "meta" and moved.lengths.device.type == "cpu"
