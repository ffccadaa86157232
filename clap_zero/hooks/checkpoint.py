"""When checkpoints are written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from clap_zero.checkpoint.state import save
from clap_zero.checkpoint.store import CheckpointStore
from clap_zero.distributed import collectives
from clap_zero.errors import CheckpointError
from clap_zero.phases import phase
from clap_zero.training.hooks import Hook
from clap_zero.training.loop import Trainer
from clap_zero.training.step import StepResult


class CheckpointHook(Hook):
    """Every N steps, at the end, and when a signal stops the run. All ranks."""

    def __init__(
        self,
        store: CheckpointStore,
        *,
        every_steps: int,
        keep: int,
        last_saved: int | None,
        companions: Mapping[str, bytes],
    ) -> None:
        """Args:
        store: Where checkpoints are.
        every_steps: Optimizer steps between two of them.
        keep: How many complete ones stay.
        last_saved: Step of this run's checkpoint that this attempt started from, None without one.
        companions: Files that the model needs beside its weights, by name.
        """
        self._store = store
        self._every_steps = every_steps
        self._keep = keep
        self._last_saved = last_saved
        self._companions = companions
        self._place: tuple[int, int] | None = None

    def on_start(self, trainer: Trainer) -> None:
        self._place = _identity(trainer.run_dir)

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        if result.step % self._every_steps == 0:
            self._save(trainer)

    def on_stop(self, trainer: Trainer, reason: str) -> None:
        self._save(trainer)

    def on_end(self, trainer: Trainer) -> None:
        self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        if self._last_saved == trainer.state.step:
            return
        with phase("checkpoint"):
            self._check_place(trainer)
            path = save(trainer.engine.deepspeed, self._store, trainer.state, companions=self._companions)
            self._last_saved = trainer.state.step
            if trainer.world.is_main:
                self._store.prune(self._keep)
            trainer.fire("on_checkpoint", path)
            collectives.barrier()  # a patient one: rank 0 has had more to do

    def _check_place(self, trainer: Trainer) -> None:
        """Refuse to write where the run directory was: its lock, config and metrics are gone with it.

        Raises:
            CheckpointError: It was removed, or another stands in its place. On all ranks; rank 0 reports it.
        """
        if collectives.broadcast_object(_identity(trainer.run_dir) == self._place):
            return
        error = CheckpointError(
            f"{trainer.run_dir} was removed or replaced while the run wrote to it, and its metrics, config and lock "
            "with it: the run ends here without a checkpoint; give another --run_dir, or start again in this one"
        )
        error.reported_elsewhere = not trainer.world.is_main
        raise error


def _identity(folder: Path) -> tuple[int, int] | None:
    """What tells a directory from another one of its name; None where there is none."""
    try:
        found = folder.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
