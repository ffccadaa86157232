"""Output that cannot be written costs lines, never the run."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from clap_zero.hooks.console import ConsoleHook
from clap_zero.hooks.data import DataHook
from clap_zero.training.loop import Trainer
from clap_zero.training.say import say


@pytest.fixture(params=["full", "closed pipe", "closed", "ascii"])
def broken_output(request, monkeypatch) -> Iterator[None]:
    """Standard output that refuses what it gets."""
    if request.param == "closed pipe":
        read_end, write_end = os.pipe()
        os.close(read_end)
        stream = os.fdopen(write_end, "w")
    elif request.param == "full":
        stream = Path("/dev/full").open("w")  # noqa: SIM115
    else:
        stream = Path(os.devnull).open("w", encoding="ascii")  # noqa: SIM115
        if request.param == "closed":
            stream.close()
    monkeypatch.setattr(sys, "stdout", stream)
    yield
    with contextlib.suppress(OSError):
        stream.close()


def test_lines_that_cannot_be_written_are_lost_and_nothing_else(broken_output, tmp_path):
    say("a key \udcff and 音")
    console = ConsoleHook(every_steps=1)
    console.say("a checkpoint \udcff")
    (tmp_path / "skipped").write_text("a file")
    hook = DataHook(tmp_path / "skipped", rank=0, attempt=1, set_names=[], metrics=None)
    hook._write({"key": "k"})
    trainer = Trainer.__new__(Trainer)
    trainer._stepper, trainer._hooks = SimpleNamespace(close=lambda: 1 / 0), []
    trainer.close()


def test_what_an_output_has_no_character_for_is_said_all_the_same(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    say("a key \udcff and 音")
    assert stream.buffer.getvalue() == b"a key \\udcff and \\u97f3\n"


class Terminal(io.StringIO):
    """A terminal that goes away."""

    gone = False

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self.gone:
            raise OSError(28, "No space left on device")
        return super().write(text)


def test_a_terminal_that_goes_away_takes_the_bar_and_not_the_run(monkeypatch, capsys):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TQDM_MININTERVAL", "0")
    hook = ConsoleHook(every_steps=1)
    trainer = SimpleNamespace(state=SimpleNamespace(step=0), plan=SimpleNamespace(max_steps=100))
    figures = {"loss": 1.0, "samples_per_second": 1.0, "learning_rate": 1e-3, "grad_norm": 1.0, "logit_scale": 14.0}
    figures |= {"data_wait_s": 0.0, "step_time_s": 1.0, "peak_memory_bytes": 0}
    hook.on_start(trainer)
    hook.on_step(trainer, SimpleNamespace(step=1, **figures))
    terminal.gone = True
    hook.say("a line")
    for step in (2, 3):
        hook.on_step(trainer, SimpleNamespace(step=step, **figures))
    hook.on_close(trainer)
    assert "step 3/100" in capsys.readouterr().out


def test_the_exit_code_of_a_run_does_not_depend_on_its_output():
    with Path("/dev/full").open("w") as full:
        words = [sys.executable, "-m", "clap_zero.train", "--nonsense"]
        assert subprocess.run(words, stdout=full, stderr=full).returncode == 2
