"""Geometries: presets work, mistakes are named before anything is built."""

from __future__ import annotations

from importlib import resources
from typing import Any

import pytest
import torch
import yaml
from transformers import ClapConfig, ClapModel
from transformers.initialization import no_init_weights

from clap_zero.errors import ConfigError
from clap_zero.model.geometry import clap_config, override_dropout
from tests.distributed import zero_cases as zc

MILLIONS = {"tiny": 7.6, "tiny-fused": 7.6, "htsat-unfused": 153.5, "htsat-fused": 153.5, "large": 193.9}
"""Parameters; 153.5 M for the default geometry, with or without the small fusion block."""


def preset(name: str) -> dict[str, Any]:
    text = resources.files("clap_zero.config").joinpath("presets", f"{name}.yaml").read_text("utf-8")
    return yaml.safe_load(text)["model"]


@pytest.mark.parametrize("name", MILLIONS)
def test_presets(name: str) -> None:
    config = clap_config(preset(name))
    assert config.audio_config.enable_fusion == name.endswith("-fused")
    with torch.device("meta"), no_init_weights():
        model = ClapModel(config)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(MILLIONS[name], abs=0.15)
    assert config.text_config.vocab_size == 50265


@pytest.mark.parametrize("name", ["tiny", "tiny-fused"])
def test_tiny_presets_run(name: str) -> None:
    fused = name == "tiny-fused"
    model = zc.build_model(
        geometry=preset(name), pretrained=None, batch_norm="local", dropout=0.0, seed=0, ds_config={}, device=zc.CPU
    )
    pairs = zc.make_pairs(2, fused=fused, long_rows=(1,) if fused else ())
    assert model(**pairs._asdict()).audio_embeds.shape == (2, 128)


def test_htsat_unfused_is_transformers_default() -> None:
    ours, default = clap_config(preset("htsat-unfused")), ClapConfig()
    for section in ("audio_config", "text_config"):
        assert getattr(ours, section).to_dict() == getattr(default, section).to_dict()


def changed(section: str | None, **values: Any) -> dict[str, Any]:
    geometry = zc.tiny_geometry(fused=True)
    (geometry if section is None else geometry[section]).update(values)
    return geometry


@pytest.mark.parametrize(
    ("geometry", "message"),
    [
        (changed(None, projction_dim=3), "projction_dim.*projection_dim"),
        (changed("audio_config", depth=[1]), "audio_config.*'depth'.*'depths'"),
        (changed("text_config", hidden_size="wide"), "hidden_size"),
        (changed("audio_config", depths=[1, 1, 1], num_attention_heads=[1, 1, 1]), "window_size"),
        (changed("audio_config", depths=[1, 1, 1]), "3 stages and num_attention_heads 2"),
        (changed("audio_config", hidden_size=48), "set hidden_size to 32"),
        (changed("audio_config", num_attention_heads=[3, 4]), "stage 0 is 16 wide"),
        (changed("text_config", num_attention_heads=5), "num_attention_heads 5"),
        (changed("audio_config", num_mel_bins=60), "spec_size 256 is not a multiple of num_mel_bins 60"),
        (changed("audio_config", fusion_type="channel_map"), "channel_map"),
    ],
)
def test_mistakes_are_named(geometry: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        clap_config(geometry)


@pytest.mark.parametrize("probability", [-0.1, 1.0])
def test_impossible_dropout(probability: float) -> None:
    with pytest.raises(ConfigError, match="dropout"):
        override_dropout(clap_config(zc.tiny_geometry(fused=False)), probability)
