"""One command trains: through every launcher, and what a run leaves behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.integration.conftest import NUM_TEST, NUM_TRAIN
from tests.integration.jobs import FAST, ROOT, command, evaluation, keys, read_jsonl, run, steps

pytestmark = pytest.mark.integration

NAMES = {
    *("step", "epoch", "samples", "loss", "learning_rate", "grad_norm", "logit_scale", "samples_per_second"),
    *("step_time_s", "data_wait_s", "peak_memory_bytes", "attempt"),
    *("loss_audio_to_text", "loss_text_to_audio", "top1_audio_to_text", "top1_text_to_audio"),
    *("positive_similarity", "hardest_negative_similarity"),
}


def data_flags(shards: tuple[Path, Path]) -> list[str]:
    return ["--data.train", str(shards[0]), "--data.val", str(shards[1])]


def test_a_whole_run(tmp_path: Path, shards: tuple[Path, Path], port: int) -> None:
    """The command of the README with its own -m, and every file that the run promises."""
    flags = [*FAST, *data_flags(shards), "--train.max-steps=12", "--data.log-keys", "keys", "--checkpoint.keep", "1"]
    flags += ["--checkpoint.every_steps", "4", "--wandb.mode", "offline"]
    words = command("deepspeed -m", *flags, port=port)
    code, output = run(words, cwd=tmp_path)
    assert code == 0, output
    run_dir = tmp_path / "runs" / "tiny-zero2"
    lines = steps(run_dir)
    assert list(lines) == list(range(1, 13))
    assert all(set(line) >= NAMES for line in lines.values())
    assert [lines[step]["samples"] for step in (1, 5, 12)] == [8, 40, 96]
    assert [lines[step]["epoch"] for step in (5, 6, 10, 11)] == [0, 1, 1, 2]
    assert lines[2]["learning_rate"] == 1e-3 > lines[11]["learning_rate"] > lines[12]["learning_rate"] == 0
    # Every sample once an epoch, over both ranks; another order in the next.
    read = keys(tmp_path / "keys")
    assert list(read) == [0, 1] and all(len(read[rank][step]) == 4 for rank in read for step in range(1, 13))
    epochs = [
        [key for step in part for rank in (0, 1) for key in read[rank][step]] for part in (range(1, 6), range(6, 11))
    ]
    assert sorted(epochs[0]) == sorted(set(epochs[0])) == sorted(epochs[1]) and len(epochs[0]) == NUM_TRAIN
    assert epochs[0] != epochs[1]
    assert all(key.startswith("train/") and "::" in key for key in epochs[0])
    # Checkpoints, evaluation, records, W&B.
    assert [path.name for path in (run_dir / "checkpoints").glob("step-*")] == ["step-00000012"]
    assert (run_dir / "checkpoints" / "latest").read_text().strip() == "step-00000012"
    assert evaluation(run_dir, 0)["num_clips"] == evaluation(run_dir, 12)["num_clips"] == NUM_TEST
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    assert config["train"]["max_steps"] == 12 and config["model"]["preset"] == "tiny"
    assert json.loads((run_dir / "ds_config.json").read_text())["train_batch_size"] == 8
    assert len(list((run_dir / "wandb").glob("offline-run-*"))) == 1
    assert "micro 4 x accumulation 1 x world 2 = global 8" in output
    assert "negatives: all 8 pairs of a step, in one pass" in output
    # The same command again says that it is complete.
    code, output = run(words, cwd=tmp_path)
    assert code == 0 and "already complete" in output
    assert len(read_jsonl(run_dir / "metrics.jsonl")) > 12 and max(steps(run_dir)) == 12


@pytest.mark.parametrize("launcher", ["deepspeed --module", "torchrun", "accelerate", "alone"])
def test_every_launcher_trains(tmp_path: Path, shards: tuple[Path, Path], port: int, launcher: str) -> None:
    flags = [*FAST, "--data.train", str(shards[0]), "--train.max_steps", "2"]
    code, output = run(command(launcher, *flags, port=port), cwd=tmp_path)
    assert code == 0, output
    started = read_jsonl(tmp_path / "runs" / "tiny-zero2" / "metrics.jsonl")[0]
    assert started["world_size"] == (1 if launcher == "alone" else 2)
    # One rank alone accumulates two micro batches to the same global batch of 8.
    assert steps(tmp_path / "runs" / "tiny-zero2")[2]["samples"] == 16


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "ds_configs").glob("*.json")))
def test_every_shipped_json_trains_as_it_is(tmp_path: Path, shards: tuple[Path, Path], port: int, name: str) -> None:
    flags = ["--ds_config", str(ROOT / "ds_configs" / name), *data_flags(shards), "--train.max_steps", "3"]
    code, output = run(command("deepspeed -m", *flags, port=port), cwd=tmp_path)
    assert code == 0, output
    lines = steps(tmp_path / "runs" / f"tiny-{Path(name).stem}")
    assert list(lines) == [1, 2, 3] and all(line["loss"] > 0 for line in lines.values())
    last = read_jsonl(tmp_path / "runs" / f"tiny-{Path(name).stem}" / "metrics.jsonl")[-1]
    assert last["event"] == "end" and last["step"] == 3  # behind the last checkpoint, evaluation and epoch


def test_a_run_that_diverges_says_so(tmp_path: Path, shards: tuple[Path, Path]) -> None:
    flags = [*FAST, "--data.train", str(shards[0]), "--train.max_steps", "40", "--checkpoint.every_steps", "1"]
    flags[flags.index("--train.learning_rate") + 1] = "1e6"
    code, output = run(command("alone", *flags), cwd=tmp_path)
    assert code == 6 and "the last complete checkpoint is intact" in output, output
    lines = read_jsonl(tmp_path / "runs" / "tiny-zero2" / "metrics.jsonl")
    assert "NaN" not in (tmp_path / "runs" / "tiny-zero2" / "metrics.jsonl").read_text()
    assert not any(line.get("event") == "end" for line in lines)


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--ds_config", "nowhere.json"], 2, "nowhere.json"),
        (["--ds_config", str(ROOT / "ds_configs/zero2.json"), "--data.train", "nothing"], 3, "nothing"),
        pytest.param(
            *(["--ds_config", str(ROOT / "ds_configs/zero2.json"), "--train.max_step", "5"], 2, "train.max_steps"),
            marks=pytest.mark.long,
        ),
        pytest.param(
            *(["--ds_config", str(ROOT / "ds_configs/zero2.json"), "--ds.zero_optimization.stag", "3"], 2, "stage"),
            marks=pytest.mark.long,
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_line(tmp_path: Path, flags: list[str], code: int, message: str) -> None:
    """Alone, because the launcher adds nothing: exit codes through launchers are tested with the launch scripts."""
    got, output = run(command("alone", *flags), cwd=tmp_path, timeout_s=60)
    assert got == code, output
    errors = [line for line in output.splitlines() if line.startswith("clap_zero: error: ")]
    assert len(errors) == 1 and message in errors[0], output
    assert "Traceback" not in output
