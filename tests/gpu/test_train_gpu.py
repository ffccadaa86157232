"""Training on real devices: every stage and precision starts, moves and resumes; features equal those of the CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from clap_zero.audio.clips import ClipBatch
from clap_zero.audio.features import ClapFeatures, FeatureConfig
from tests.integration.jobs import ROOT, run, steps

pytestmark = [pytest.mark.gpu, pytest.mark.integration]


@pytest.mark.parametrize("mode", ["rand_trunc", "fusion"])
def test_features_on_the_device_equal_those_on_the_cpu(mode: str) -> None:
    rng = np.random.default_rng(0)
    config = FeatureConfig(mode)
    lengths = (4_800, 96_000, 480_000) + ((1_200_000,) if mode == "fusion" else ())
    waves = [(0.1 * rng.standard_normal(length)).astype(np.float32) for length in lengths]
    clips = ClipBatch.from_clips(waves, config, rng=None, as_int16=True)
    expected, expected_longer = ClapFeatures(config, device="cpu")(clips)
    got, longer = ClapFeatures(config, device="cuda")(clips.to("cuda"))
    assert torch.equal(longer.cpu(), expected_longer)
    assert (got.cpu() - expected).abs().max() < 1e-3


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "ds_configs").glob("*.json")))
@pytest.mark.parametrize("preset", ["tiny", "tiny-fused"])
def test_every_shipped_json_trains_and_resumes(tmp_path: Path, name: str, preset: str) -> None:
    num_gpus = min(2, torch.cuda.device_count())
    words = ["deepspeed", "--num_gpus", str(num_gpus), "-m", "clap_zero.train", "--model.preset", preset]
    words += ["--ds_config", str(ROOT / "ds_configs" / f"{name}.json"), "--run_dir", "run", "--train.max_steps", "6"]
    words += ["--checkpoint.every_steps", "3", "--wandb.mode", "disabled", "--data.workers", "2"]
    code, output = run(words, cwd=tmp_path, timeout_s=500)
    assert code == 0, output
    lines = steps(tmp_path / "run")
    assert list(lines) == [1, 2, 3, 4, 5, 6] and all(np.isfinite(line["loss"]) for line in lines.values())
    (tmp_path / "run" / "finished.json").unlink()
    code, output = run(words, cwd=tmp_path, timeout_s=500)
    assert code == 0 and "resumed from" in output, output


def test_peak_memory_is_the_devices(tmp_path: Path) -> None:
    words = ["deepspeed", "--num_gpus", "1", "-m", "clap_zero.train", "--model.preset", "tiny"]
    words += ["--ds_config", str(ROOT / "ds_configs" / "zero2.json"), "--run_dir", "run", "--train.max_steps", "2"]
    code, output = run([*words, "--wandb.mode", "disabled"], cwd=tmp_path, timeout_s=500)
    assert code == 0, output
    total = torch.cuda.get_device_properties(0).total_memory
    assert 0 < steps(tmp_path / "run")[2]["peak_memory_bytes"] < total
