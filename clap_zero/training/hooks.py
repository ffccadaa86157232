"""The moments of a run that a hook can act at.

Eight moments; each does nothing unless a hook overrides it. Hooks run in the order in which `setup` lists them, on
every rank that has them. A hook that calls a collective must be there on all ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clap_zero.training.loop import Trainer
    from clap_zero.training.step import StepResult


class Hook:
    """Base of all hooks."""

    def on_start(self, trainer: Trainer) -> None:
        """Before the first step of this attempt; the model and the data are ready, a checkpoint is loaded."""

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        """After each optimizer step; the trainer's state already counts it."""

    def on_epoch_end(self, trainer: Trainer, epoch: int) -> None:
        """After the last step of an epoch (0-based)."""

    def on_checkpoint(self, trainer: Trainer, path: Path) -> None:
        """After a complete checkpoint was written and `latest` names it."""

    def on_evaluate(self, trainer: Trainer, metrics: dict[str, Any]) -> None:
        """After an evaluation, with its figures."""

    def on_stop(self, trainer: Trainer, reason: str) -> None:
        """A signal asked the run to stop; the step under way is finished."""

    def on_end(self, trainer: Trainer) -> None:
        """After the last step of the run."""

    def on_close(self, trainer: Trainer) -> None:
        """Last of all, also after an error. Must not call collectives, must not raise."""
