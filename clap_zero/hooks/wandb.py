"""The run in Weights & Biases. Whatever goes wrong there is a warning; training goes on."""

from __future__ import annotations

import queue
import secrets
import threading
from pathlib import Path
from typing import Any

from clap_zero.errors import first_line
from clap_zero.training.hooks import Hook
from clap_zero.training.loop import Trainer
from clap_zero.training.metrics import step_line
from clap_zero.training.say import say
from clap_zero.training.step import StepResult

CLOSE_TIMEOUT_S = 30.0

HOLD_S = 20.0
"""How long W&B waits for the first step: importing it takes a second of computing from whatever comes before that."""


class WandbHook(Hook):
    """One W&B run per job, whatever the number of ranks and restarts. Rank 0 only.

    The run keeps its id in RUN/wandb/run_id, so that a resumed job goes on in the same W&B run; offline, each attempt
    is a directory of its own with that id and `wandb sync` joins them. The x axis is our own `step`: a resume that goes
    back to a checkpoint logs those steps again and W&B drops nothing.

    Everything that can wait for the network happens in a thread of its own, fed through a queue.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        mode: str,
        settings: dict[str, Any],
        config: dict[str, Any],
        attempt: int,
        hide_command: bool = False,
    ) -> None:
        """Args:
        run_dir: Directory of the run.
        mode: "auto", "online", "offline" or "disabled"; auto is offline without a key, after WANDB_MODE.
        settings: project, name, entity.
        config: The resolved configuration to attach.
        attempt: Number of this start of the run.
        hide_command: The command line holds what W&B must not get; it collects nothing about the process then.
        """
        self._run_dir = run_dir
        self._mode = mode
        self._settings = settings
        self._config = config
        self._attempt = attempt
        self._hide_command = hide_command
        self._queue: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._failed = threading.Event()
        self._may_begin = threading.Event()
        self._thread: threading.Thread | None = None

    def on_start(self, trainer: Trainer) -> None:
        if self._mode != "disabled":
            self._thread = threading.Thread(target=self._work, name="clap_zero-wandb", daemon=True)
            self._thread.start()

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        self._may_begin.set()
        line = step_line(result, attempt=self._attempt)
        self._put({"step": result.step} | {f"train/{k}": v for k, v in line.items() if k != "step" and v is not None})

    def on_evaluate(self, trainer: Trainer, metrics: dict[str, Any]) -> None:
        figures = {f"eval/{k}": v for k, v in metrics.items() if isinstance(v, int | float)}
        self._put({"step": trainer.state.step} | figures)

    def on_close(self, trainer: Trainer) -> None:
        if self._thread is None:
            return
        self._may_begin.set()
        self._queue.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            _warn(f"no end after {CLOSE_TIMEOUT_S:.0f} s; what was logged is in {self._run_dir / 'wandb'}")

    def _put(self, line: dict[str, Any]) -> None:
        if self._thread is not None and not self._failed.is_set():
            self._queue.put(line)

    def _work(self) -> None:
        self._may_begin.wait(HOLD_S)
        # W&B raises many kinds of errors, its own and those of its network and disk libraries; none may end training.
        try:
            self._log_all()
        except Exception as error:  # noqa: BLE001
            self._failed.set()
            _warn(f"{type(error).__name__}: {first_line(error)}; training goes on without it")

    def _log_all(self) -> None:
        import wandb

        mode = self._resolve_mode(wandb)
        if mode == "disabled":
            self._failed.set()
            return
        run = wandb.init(
            id=self._run_id(),
            resume="allow",
            mode=mode,
            dir=str(self._run_dir),
            config=self._config,
            settings=wandb.Settings(init_timeout=90, console="off", silent=True, x_disable_meta=self._hide_command),
            **self._settings,
        )
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        say(f"W&B {mode}: {run.dir if mode == 'offline' else run.url}")
        while (line := self._queue.get()) is not None:
            run.log(line)
        run.finish()

    def _resolve_mode(self, wandb: Any) -> str:
        """The user's flag, else WANDB_MODE, else online with a key and offline without one."""
        if self._mode != "auto":
            return self._mode
        mode = wandb.setup().settings.mode
        if mode and mode != "online":
            return str(mode)
        return "online" if wandb.login(prompt=False, verify=False) else "offline"

    def _run_id(self) -> str:
        path = self._run_dir / "wandb" / "run_id"
        if path.exists() and (kept := path.read_text().strip()):
            return kept
        path.parent.mkdir(parents=True, exist_ok=True)
        new = secrets.token_hex(4)
        path.write_text(new + "\n")
        return new


def _warn(text: str) -> None:
    say(f"clap_zero: warning: W&B: {text}")
