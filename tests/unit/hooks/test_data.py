from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from clap_zero.data.skips import BLACKLISTED
from clap_zero.data.stopwatch import STAGES
from clap_zero.data.tally import Tally
from clap_zero.distributed.collectives import rank_and_size
from clap_zero.hooks.console import ConsoleHook
from clap_zero.hooks.data import DataHook
from clap_zero.hooks.jsonl import MetricsHook
from clap_zero.testing import run_distributed
from clap_zero.training.run_directory import read_jsonl


def trainer(step: int = 0) -> SimpleNamespace:
    plan = SimpleNamespace(steps_per_epoch=3, max_steps=1000)
    return SimpleNamespace(state=SimpleNamespace(step=step), plan=plan)


def result(step: int, *skipped: tuple[str, str], epoch: int = 0, sets: dict[int, int] | None = None) -> SimpleNamespace:
    tally = Tally(samples=4, sets=Counter(sets or {0: 4}), truncated_captions=1, loader_s={"read": 0.5})
    tally.skipped.update(reason for _, reason in skipped)
    return SimpleNamespace(step=step, epoch=epoch, skipped=skipped, tally=tally)


def run_on_rank(directory: str) -> list[str]:
    """Two epochs of three steps and a part of a third one; rank 1 has other samples than rank 0."""
    rank, _ = rank_and_size()
    said: list[str] = []
    metrics = MetricsHook(Path(directory) / "metrics.jsonl", attempt=2) if rank == 0 else None
    hook = DataHook(
        Path(directory) / "skipped", rank=rank, attempt=2, set_names=["a", "b"], metrics=metrics, say=said.append
    )
    for step in range(1, 8):
        skipped = ((f"k{step}", "empty"), ("black", BLACKLISTED)) if rank == 1 and step % 2 else ()
        hook.on_step(trainer(step), result(step, *skipped, epoch=(step - 1) // 3, sets={rank: 4}))
        if step % 3 == 0:
            hook.on_epoch_end(trainer(step), (step - 1) // 3)
    hook.on_end(trainer(7))
    hook.on_end(trainer(7))  # nothing new: no second line
    hook.on_close(trainer(7))
    return said


def test_an_epoch_is_summed_up_over_ranks(tmp_path):
    said, nothing = run_distributed(run_on_rank, 2, str(tmp_path))
    events = list(read_jsonl(tmp_path / "metrics.jsonl"))
    assert [(e["event"], e["epoch"], e["step"], e["steps"]) for e in events] == [
        ("epoch", 0, 3, 3), ("epoch", 1, 6, 3), ("epoch", 2, 7, 1)
    ]  # fmt: skip
    assert events[0] == {
        "event": "epoch", "step": 3, "attempt": 2, "epoch": 0, "steps": 3, "steps_per_epoch": 3, "samples": 24,
        "skipped": {"empty": 2, "blacklisted": 2}, "sets": {"a": 12, "b": 12}, "truncated_captions": 6,
        "equal_captions": 0, "loader_s": {"read": 3.0},
    }  # fmt: skip
    assert [e["skipped"].get("empty", 0) for e in events] == [2, 1, 1] and nothing == [] and len(said) == 3
    assert said[0].startswith(
        "epoch 0: 24 pairs; by data set: a 12, b 12; 4 skipped (empty 2, blacklisted 2), listed in"
    )
    assert not (tmp_path / "skipped" / "rank00000.jsonl").exists()
    lines = [json.loads(line) for line in (tmp_path / "skipped" / "rank00001.jsonl").read_text().splitlines()]
    assert len(lines) == 8
    assert lines[0] == {"epoch": 0, "key": "k1", "reason": "empty", "step": 1, "attempt": 2}
    assert {line["key"] for line in lines} == {"k1", "k3", "k5", "k7", "black"}


def test_a_list_that_cannot_be_written_is_a_warning(tmp_path, capsys):
    (tmp_path / "skipped").write_text("a file")
    hook = DataHook(tmp_path / "skipped", rank=0, attempt=1, set_names=[], metrics=None)
    for step in range(3):
        hook.on_step(trainer(), result(step, ("k", "x")))
    assert capsys.readouterr().out.count("training goes on") == 1


def test_nothing_is_called_listed_that_is_not(tmp_path):
    (tmp_path / "skipped").write_text("a file")
    said: list[str] = []
    metrics = MetricsHook(tmp_path / "metrics.jsonl", attempt=1)
    hook = DataHook(tmp_path / "skipped", rank=0, attempt=1, set_names=[], metrics=metrics, say=said.append)
    hook.on_step(trainer(), result(1, ("k", "x")))
    hook.on_epoch_end(trainer(), 0)
    assert "1 skipped (x 1), not all of them listed: " in said[0]
    metrics.on_close(trainer())


def test_a_run_that_ends_by_an_error_says_what_its_own_rank_has_seen(tmp_path):
    said: list[str] = []
    metrics = MetricsHook(tmp_path / "metrics.jsonl", attempt=1)
    hook = DataHook(tmp_path / "skipped", rank=0, attempt=1, set_names=[], metrics=metrics, say=said.append)
    hook.on_step(trainer(), result(1, ("k", "x"), epoch=2))
    hook.on_close(trainer())  # no collective: the other ranks may be anywhere
    metrics.on_close(trainer())
    assert len(said) == 1 and said[0].startswith("epoch 2: 4 pairs; 1 skipped (x 1), listed in")
    assert said[0].endswith("of this rank alone, because the run ended within the epoch")


@pytest.mark.parametrize(("wait_s", "num_hints"), [(0.05, 0), (0.5, 2)])
def test_steps_that_wait_for_data_are_said_with_the_stage(capsys, wait_s, num_hints):
    hook = ConsoleHook(every_steps=10_000)
    hook.on_start(trainer())
    seconds = {stage: 3.0 if stage == "decode" else 0.5 for stage in STAGES}
    for step in range(1, 301):
        first = step <= 2  # the loader starts: that is no sign of anything
        figures = {"loss": 1.0, "grad_norm": 1.0, "learning_rate": 1e-3, "logit_scale": 14.0}
        figures |= {"samples_per_second": 1.0, "peak_memory_bytes": 0, "loader_s": seconds}
        step_result = SimpleNamespace(
            step=step, data_wait_s=90.0 if first else wait_s, step_time_s=100.0 if first else 1.0, **figures
        )
        hook.on_step(trainer(step), step_result)
    hints = [line for line in capsys.readouterr().out.splitlines() if line.startswith("steps wait")]
    assert len(hints) == num_hints
    assert all("50% of the time" in hint and "decode takes 50%: more --data.workers" in hint for hint in hints)
