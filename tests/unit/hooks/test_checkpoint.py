"""A run whose directory is taken away says so, instead of writing checkpoints beside lost metrics."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clap_zero.checkpoint.store import CheckpointStore
from clap_zero.errors import CheckpointError
from clap_zero.hooks.checkpoint import CheckpointHook


def trainer_in(run_dir: Path) -> Any:
    return SimpleNamespace(run_dir=run_dir, state=SimpleNamespace(step=3), world=SimpleNamespace(is_main=True))


@pytest.mark.parametrize("made_again", [False, True])
def test_a_run_directory_that_was_removed_ends_the_run(tmp_path: Path, made_again: bool) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    hook = CheckpointHook(
        CheckpointStore(run_dir / "checkpoints"), every_steps=3, keep=1, last_saved=None, companions={}
    )
    trainer = trainer_in(run_dir)
    hook.on_start(trainer)
    shutil.rmtree(run_dir)
    if made_again:
        (tmp_path / "other").mkdir()  # takes the number of the removed one
        run_dir.mkdir()
    with pytest.raises(CheckpointError, match="was removed or replaced while the run wrote to it"):
        hook.on_end(trainer)
    assert not (run_dir / "checkpoints").exists()
