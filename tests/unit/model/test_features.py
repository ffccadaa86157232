"""Which features a model takes, from its configuration and from the files beside its weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import ClapFeatureExtractor

from clap_zero.audio.features import FeatureConfig
from clap_zero.errors import CheckpointError, ConfigError
from clap_zero.model.clap import feature_config
from clap_zero.model.geometry import clap_config
from tests.distributed import zero_cases as zc

FUSED, UNFUSED = (clap_config(zc.tiny_geometry(fused=fused)) for fused in (True, False))


@pytest.mark.parametrize(
    ("config", "truncation", "expected"),
    [
        (FUSED, "auto", "fusion"),
        (UNFUSED, "auto", "rand_trunc"),
        (FUSED, "fusion", "fusion"),
    ],
)
def test_truncation(config, truncation: str, expected: str) -> None:
    features = feature_config(config, None, truncation)
    assert features.truncation == expected
    assert (features.f_min, features.f_max, features.num_mels, features.chunk_frames) == (50, 14_000, 64, 1001)


def test_chunks_for_a_model_that_cannot_use_them() -> None:
    with pytest.raises(ConfigError, match="no fusion"):
        feature_config(UNFUSED, None, "fusion")


def test_a_fused_model_without_chunks_would_be_another_one_after_export() -> None:
    with pytest.raises(ConfigError, match="'rand_trunc', but the model has fusion.*htsat-unfused"):
        feature_config(FUSED, None, "rand_trunc")


def test_the_extractors_own_file_is_followed(tmp_path: Path) -> None:
    ClapFeatureExtractor(frequency_min=20, frequency_max=12_000, max_length_s=5).save_pretrained(tmp_path)
    features = feature_config(UNFUSED, tmp_path)
    assert (features.f_min, features.f_max) == (20, 12_000)
    assert (features.max_samples, features.chunk_frames) == (240_000, 501)


def test_without_the_file_the_defaults_stand(tmp_path: Path) -> None:
    assert feature_config(FUSED, tmp_path) == feature_config(FUSED)


def test_only_the_truncation_of_the_file_is_the_models(tmp_path: Path) -> None:
    content = {"truncation": "rand_trunc", "nb_max_samples": 240_000, "frequency_min": 50}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(content))
    assert feature_config(FUSED, tmp_path) == FeatureConfig("fusion", max_samples=240_000)


def test_a_file_that_does_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps({"feature_size": 128}))
    with pytest.raises(CheckpointError, match="feature_size 128"):
        feature_config(FUSED, tmp_path)
    path.write_text(json.dumps({"max_length_s": 9.99}))
    with pytest.raises(CheckpointError, match="whole seconds"):
        feature_config(FUSED, tmp_path)
    path.write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        feature_config(FUSED, tmp_path)
