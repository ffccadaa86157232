"""metrics.jsonl and the logs of sample keys: append-only lines that survive kills and resumes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import IO, Any

from clap_zero.errors import ConfigError
from clap_zero.training.hooks import Hook
from clap_zero.training.loop import Trainer
from clap_zero.training.metrics import step_line
from clap_zero.training.say import say
from clap_zero.training.step import StepResult


class MetricsHook(Hook):
    """One line a step in RUN/metrics.jsonl, and lines with an "event" at the other moments. Rank 0 only."""

    def __init__(self, path: Path, *, attempt: int) -> None:
        """Args:
        path: The file; lines are appended.
        attempt: 1 for the first start of the run, one more for each later start.
        """
        self._lines = LineFile(path)
        self._attempt = attempt

    def on_start(self, trainer: Trainer) -> None:
        self.event("start", trainer, world_size=trainer.world.size, global_batch=trainer.plan.global_batch)

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        self._lines.append(step_line(result, attempt=self._attempt))

    def on_checkpoint(self, trainer: Trainer, path: Path) -> None:
        self.event("checkpoint", trainer, path=path.name)

    def on_evaluate(self, trainer: Trainer, metrics: dict[str, Any]) -> None:
        self.event("evaluation", trainer, metrics=metrics)

    def on_stop(self, trainer: Trainer, reason: str) -> None:
        self.event("stop", trainer, reason=reason)

    def on_close(self, trainer: Trainer) -> None:
        self._lines.close()

    def event(self, name: str, trainer: Trainer, **fields: Any) -> None:
        """Write a line that is no step."""
        self._lines.append({"event": name, "step": trainer.state.step, "attempt": self._attempt, **fields})


class EndHook(Hook):
    """The last line of a complete run in RUN/metrics.jsonl; has to be the last hook. Rank 0 only."""

    def __init__(self, metrics: MetricsHook) -> None:
        """Args:
        metrics: Has the file.
        """
        self._metrics = metrics

    def on_end(self, trainer: Trainer) -> None:
        self._metrics.event("end", trainer)


class KeysHook(Hook):
    """DIR/rankNNNNN.jsonl: the keys that this rank trained on, a line a step. Every rank writes its own file."""

    def __init__(self, directory: Path, *, rank: int, attempt: int) -> None:
        """Args:
        directory: Made when it is absent.
        rank: Number of this rank.
        attempt: Number of this start of the run.

        Raises:
            ConfigError: The directory cannot be made, or the file not be opened.
        """
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._lines = LineFile(directory / f"rank{rank:05d}.jsonl")
        except OSError as error:
            raise ConfigError(f"--data.log_keys {directory} cannot be written: {error.strerror}") from error
        self._attempt = attempt

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        line = {"step": result.step, "epoch": result.epoch, "attempt": self._attempt, "keys": list(result.keys)}
        self._lines.append(line)

    def on_close(self, trainer: Trainer) -> None:
        self._lines.close()


class LineFile:
    """A JSON-lines file to append to. A full disk costs lines, never the run; nor does a figure that is not finite."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._torn = path.exists() and not _ends_with_newline(path)
        self._warned = False
        self._file: IO[bytes] | None = path.open("ab", buffering=0)

    def append(self, line: dict[str, Any]) -> None:
        """Write a line, or what the disk takes of it; the next line then begins with a line break."""
        if self._file is None:
            return
        # ASCII only: a key can hold bytes that are no UTF-8.
        text = json.dumps(_finite(line), ensure_ascii=True, allow_nan=False) + "\n"
        data = ("\n" * self._torn + text).encode("ascii")
        try:
            self._torn = self._file.write(data) != len(data)
        except OSError as error:
            self._torn = True
            if not self._warned:
                self._warned = True
                say(f"clap_zero: warning: {self._path} cannot be written ({error.strerror}); training goes on")

    @property
    def lacks_lines(self) -> bool:
        """Whether a line could not be written."""
        return self._warned

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _finite(value: Any) -> Any:
    """The value with None for what JSON has no number for: NaN and the infinities."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        if size == 0:
            return True
        file.seek(-1, 2)
        return file.read(1) == b"\n"
