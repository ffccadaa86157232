"""Presets are geometries that transformers builds, with the sizes that their files state."""

from __future__ import annotations

import pytest

from clap_zero.config.flags import FIELDS
from clap_zero.config.preset import load_preset
from clap_zero.config.schema import PRESETS


@pytest.mark.parametrize("name", [*PRESETS, None])
def test_recommendations_are_keys_of_the_run_config(name: str | None) -> None:
    preset = load_preset(name)
    assert set(preset.run) <= set(FIELDS)
    assert ("train.max_steps" in preset.run) != ("train.epochs" in preset.run)
    assert preset.bytes_per_pair > preset.bytes_per_pair_checkpointed > 0
    assert bool(preset.model) == (name is not None)


def test_every_file_is_a_preset() -> None:
    from importlib import resources

    files = {file.name for file in resources.files("clap_zero.config").joinpath("presets").iterdir()}
    assert files == {f"{name}.yaml" for name in (*PRESETS, "pretrained")}


@pytest.mark.parametrize(
    ("name", "millions", "fusion"),
    [
        ("tiny", 7.55, False),
        ("tiny-fused", 7.56, True),
        ("htsat-unfused", 153.49, False),
        ("htsat-fused", 153.51, True),
        ("large", 193.91, False),
    ],
)
def test_geometry(name: str, millions: float, fusion: bool) -> None:
    import torch
    from transformers import ClapConfig, ClapModel

    preset = load_preset(name)
    with torch.device("meta"):
        model = ClapModel(ClapConfig(**preset.model))
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count / 1e6 == pytest.approx(millions, abs=0.01)
    assert preset.num_parameters == count
    assert model.config.audio_config.enable_fusion is fusion
    side = 256 // model.config.audio_config.patch_stride[0]
    stages = len(model.config.audio_config.depths)
    assert side // 2 ** (stages - 1) >= model.config.audio_config.window_size, "HTSAT crashes below its window"


def test_default_geometry_is_transformers_own() -> None:
    from transformers import ClapConfig

    ours, default = ClapConfig(**load_preset("htsat-unfused").model).to_dict(), ClapConfig().to_dict()
    assert ours == default
