"""The learning rate goes by optimizer steps, whatever the accumulation and the number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from clap_zero.training.schedule import Schedule
from tests.integration.jobs import ROOT, command, run, steps

pytestmark = [pytest.mark.integration, pytest.mark.long]

NUM_STEPS, WARMUP_STEPS, PEAK, MINIMUM = 20, 5, 1e-3, 1e-5


def rates(folder: Path, launcher: str, shards: tuple[Path, Path], port: int, *flags: str) -> list[float]:
    """The rate that DeepSpeed's optimizer had in each step of a run of two micro batches of 2 a step and rank."""
    num_ranks = 1 if launcher == "alone" else 2
    folder.mkdir()
    words = ["--ds_config", str(ROOT / "ds_configs" / "zero2.json"), "--ds.bf16", "null", "--wandb.mode", "disabled"]
    words += ["--data.train", str(shards[0]), "--run_dir", "run", "--train.max_steps", str(NUM_STEPS)]
    words += ["--train.micro_batch_size", "2", "--train.global_batch_size", str(4 * num_ranks), *flags]
    code, output = run(command(launcher, *words, port=port), cwd=folder)
    assert code == 0, output
    assert f"micro 2 x accumulation 2 x world {num_ranks}" in output
    return [line["learning_rate"] for _, line in sorted(steps(folder / "run").items())]


def test_t12_one_cosine_for_all_settings(tmp_path: Path, shards: tuple[Path, Path], port: int) -> None:
    flags = ["--train.warmup_steps", str(WARMUP_STEPS), "--train.learning_rate", str(PEAK)]
    flags += ["--train.min_learning_rate", str(MINIMUM)]
    alone = rates(tmp_path / "one", "alone", shards, port, *flags)
    two = rates(tmp_path / "two", "deepspeed -m", shards, port, *flags)
    assert alone == two, "one curve"
    curve = Schedule(peak=PEAK, minimum=MINIMUM, warmup_steps=WARMUP_STEPS, max_steps=NUM_STEPS, kind="cosine")
    assert alone == pytest.approx([curve(step) for step in range(1, NUM_STEPS + 1)], rel=1e-12)
    assert max(range(NUM_STEPS), key=alone.__getitem__) + 1 == WARMUP_STEPS and alone[WARMUP_STEPS - 1] == PEAK
    assert min(range(NUM_STEPS), key=alone.__getitem__) + 1 == NUM_STEPS
    assert alone[-1] == pytest.approx(MINIMUM, rel=1e-12)
    falling = alone[WARMUP_STEPS - 1 :]
    assert falling == sorted(falling, reverse=True), "one cycle"
