"""What rank 0 shows: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

from tqdm import tqdm

from clap_zero.data.stopwatch import STAGES, describe_wait
from clap_zero.training.hooks import Hook
from clap_zero.training.loop import Trainer
from clap_zero.training.say import say
from clap_zero.training.step import StepResult

_WAIT_SHARE = 0.1
_WAIT_WINDOW = 20
_STEPS_BETWEEN_HINTS = 200
_FIRST_STEPS = 2
"""Steps that wait for the loader to start."""


class ConsoleHook(Hook):
    """Loss, rate and remaining time of the run. Rank 0 only."""

    def __init__(self, *, every_steps: int) -> None:
        """Args:
        every_steps: Steps between two plain lines; a progress bar moves every step.
        """
        self._every_steps = every_steps
        self._bar: tqdm | None = None
        self._started = 0.0
        self._first_step = 0
        self._first_loss: float | None = None
        self._latest: deque[StepResult] = deque(maxlen=_WAIT_WINDOW)
        self._next_hint = 0

    def on_start(self, trainer: Trainer) -> None:
        self._started = time.monotonic()
        self._first_step = trainer.state.step
        if sys.stderr.isatty():
            self._bar = tqdm(
                total=trainer.plan.max_steps, initial=trainer.state.step, unit="step", dynamic_ncols=True, leave=True
            )

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        if self._first_loss is None:
            self._first_loss = result.loss
        if self._bar is not None:
            self._show(self._bar, result)
        elif result.step % self._every_steps == 0 or result.step in (1, trainer.plan.max_steps):
            self._print_line(trainer, result)
        self._watch_waiting(result)

    def on_epoch_end(self, trainer: Trainer, epoch: int) -> None:
        self.say(f"epoch {epoch} ends at step {trainer.state.step}")

    def on_checkpoint(self, trainer: Trainer, path: Path) -> None:
        self.say(f"checkpoint {path}")

    def on_evaluate(self, trainer: Trainer, metrics: dict[str, Any]) -> None:
        names = (f"{way}.{figure}" for figure in ("R@1", "median_rank") for way in ("audio_to_text", "text_to_audio"))
        shown = ", ".join(f"{name} {metrics[name]:.3g}" for name in names if name in metrics)
        self.say(f"evaluation at step {trainer.state.step}: {shown} (of {metrics.get('num_clips')} held-out clips)")

    def on_stop(self, trainer: Trainer, reason: str) -> None:
        self.say(f"stopping after step {trainer.state.step}: {reason}; the same command continues the run")

    def on_close(self, trainer: Trainer) -> None:
        if self._bar is not None:
            with contextlib.suppress(OSError, ValueError):
                self._bar.close()
            self._bar = None

    def _show(self, bar: tqdm, result: StepResult) -> None:
        """Move the bar; one whose terminal is gone is shown no more, and the run goes on."""
        try:
            bar.set_postfix_str(
                f"loss {result.loss:.4f}, {result.samples_per_second:.0f} pairs/s, lr {result.learning_rate:.2e}"
            )
            bar.update(result.step - bar.n)
        except (OSError, ValueError):
            bar.disable = True
            self._bar = None

    def _watch_waiting(self, result: StepResult) -> None:
        """Say that steps wait for data, and for which part of the loader, when it is much; then not for a while."""
        if result.step > self._first_step + _FIRST_STEPS:
            self._latest.append(result)
        if len(self._latest) < _WAIT_WINDOW or result.step < self._next_hint:
            return
        share = sum(r.data_wait_s for r in self._latest) / max(sum(r.step_time_s for r in self._latest), 1e-9)
        if share > _WAIT_SHARE:
            self._next_hint = result.step + _STEPS_BETWEEN_HINTS
            seconds = {stage: sum(latest.loader_s[stage] for latest in self._latest) for stage in STAGES}
            self.say(describe_wait(share, seconds))

    def _print_line(self, trainer: Trainer, result: StepResult) -> None:
        done = result.step - self._first_step
        eta_s = (time.monotonic() - self._started) / done * (trainer.plan.max_steps - result.step)
        norm = "overflow" if result.grad_norm is None else f"{result.grad_norm:.3f}"
        self.say(
            f"step {result.step}/{trainer.plan.max_steps}  loss {result.loss:.4f}  lr {result.learning_rate:.2e}  "
            f"grad_norm {norm}  scale {result.logit_scale:.2f}  {result.samples_per_second:.1f} pairs/s  "
            f"data {result.data_wait_s:.2f}s  {result.peak_memory_bytes / 2**30:.1f} GiB  eta {_duration(eta_s)}"
        )

    def say(self, text: str) -> None:
        """Show a line; a progress bar stays below it."""
        if self._bar is None:
            say(text)
            return
        with contextlib.suppress(OSError, ValueError), self._bar.external_write_mode():
            say(text)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"
