"""`clap-zero eval RUN`: held-out figures of a checkpoint, on record and on the screen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clap_zero.checkpoint.store import CheckpointStore
from clap_zero.errors import CheckpointError, ConfigError, DataError
from clap_zero.evaluation.from_run import eval_run
from clap_zero.evaluation.runner import EvalResult, mark_best, read_results, write_result
from tests.unit.checkpoint.small_run import make_model, make_run, make_shards


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    shards = make_shards(folder / "val", num_clips=5, captions=2)
    return make_run(folder / "run", make_model(fusion=True), val=(str(shards),))


def test_writes_and_prints_the_figures(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = eval_run(run_dir, device="cpu")
    content = json.loads((run_dir / "eval" / "step-7.json").read_text())
    assert (content["step"], content["num_clips"], content["num_captions"]) == (7, 5, 10)
    assert content["audio_to_text.R@1"] == result.metrics["audio_to_text.R@1"]
    assert {"text_to_audio.mAP@10", "audio_to_text.median_rank", "text_to_audio.R@5"} <= content.keys()
    printed = capsys.readouterr().out
    assert "5 clips, 10 captions" in printed and "audio_to_text" in printed and "step 7" in printed
    assert eval_run(run_dir, step=7, device="cpu", batch_size=3).metrics == pytest.approx(result.metrics)


def test_a_checkpoint_path_writes_beside_its_run(tmp_path: Path) -> None:
    shards = make_shards(tmp_path / "val", num_clips=2)
    run = make_run(tmp_path / "run", make_model(fusion=False), val=(str(shards),))
    checkpoint = run / "checkpoints" / "step-00000007"
    eval_run(checkpoint, device="cpu")
    assert (run / "eval" / "step-7.json").is_file() and not (checkpoint / "eval").exists()
    with pytest.raises(CheckpointError, match="is one checkpoint"):
        eval_run(checkpoint, step=3, device="cpu")


@pytest.mark.parametrize("fraction", [0.05, 0.9])
def test_the_runs_limit_of_bad_samples_counts(tmp_path: Path, fraction: float) -> None:
    shards = make_shards(tmp_path / "val", num_clips=6)
    (shards / "sizes.json").write_text(json.dumps({"0.tar": 27, "1.tar": 3}))
    data = {"train": ["unused"], "val": [str(shards)], "max_bad_fraction": fraction}
    run = make_run(tmp_path / "run", make_model(fusion=False), changes={"data": data})
    if fraction > 0.5:
        result = eval_run(run, device="cpu")
        assert (result.num_clips, result.num_skipped) == (6, 24)
    else:
        with pytest.raises(DataError, match="max_bad_fraction 0.05"):
            eval_run(run, device="cpu")


def test_best_is_a_marked_step(run_dir: Path) -> None:
    with pytest.raises(CheckpointError, match="marked as best"):
        eval_run(run_dir, step="best")
    CheckpointStore(run_dir / "checkpoints").mark_best(7)
    assert eval_run(run_dir, step="best", device="cpu").num_clips == 5


def test_nothing_held_out_or_missing_shards_are_errors(tmp_path: Path) -> None:
    model = make_model(fusion=False)
    with pytest.raises(ConfigError, match=r"no data\.val"):
        eval_run(make_run(tmp_path / "a", model), device="cpu")
    with pytest.raises((DataError, ConfigError), match="nowhere"):
        eval_run(make_run(tmp_path / "b", model, val=(str(tmp_path / "nowhere"),)), device="cpu")


def test_the_best_checkpoint_is_by_mean_map(tmp_path: Path) -> None:
    assert mark_best(tmp_path) is None
    store = CheckpointStore(tmp_path / "checkpoints")
    for step in (10, 20, 30):
        store.commit(store.begin(step), step, {})
    for step, (forward, backward) in {0: (0.9, 0.9), 10: (0.5, 0.2), 20: (0.3, 0.4), 30: (0.2, 0.2)}.items():
        metrics = {"audio_to_text.mAP@10": forward, "text_to_audio.mAP@10": backward}
        write_result(tmp_path, step, EvalResult(metrics, 4, 4))
    (tmp_path / "eval" / "step-40.json").write_text("{torn")
    assert list(read_results(tmp_path)) == [0, 10, 20, 30]
    assert mark_best(tmp_path) == 20
    (store.root / "step-00000020" / "manifest.json").rename(tmp_path / "manifest.json")
    assert mark_best(tmp_path) == 10
    (tmp_path / "manifest.json").rename(store.root / "step-00000020" / "manifest.json")
    assert mark_best(tmp_path) == 20
    store.prune(1)
    assert store.resolve("best") == store.root / "step-00000020"
    assert store.newest_complete() == store.root / "step-00000030"
