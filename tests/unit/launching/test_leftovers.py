"""Files of launchers: those of living ones stay, those of killed ones go, in whatever way they end."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from clap_zero.launching import leftovers

LAUNCHER = """
import pathlib, sys, tempfile, time
from clap_zero.launching import leftovers
leftovers.remove_on_signals()
leftovers.keep(lambda: pathlib.Path(tempfile.mkstemp(dir=sys.argv[1])[1])).write_text("s3cret")
leftovers.keep(lambda: pathlib.Path(tempfile.mkdtemp(dir=sys.argv[1])))
print("ready", flush=True)
time.sleep(60)
"""


def launcher(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_removes_what_is_kept(tmp_path: Path, number: int) -> None:
    with launcher(tmp_path) as process:
        process.send_signal(number)
        assert process.wait(timeout=20) == 128 + number
    assert list(tmp_path.iterdir()) == []


def test_only_what_a_killed_launcher_left_is_abandoned(tmp_path: Path) -> None:
    """Not told apart by process ids: two containers may share the disk and the name of the host."""
    with launcher(tmp_path) as process:
        leftovers.remove_abandoned(tmp_path.iterdir())
        assert len(list(tmp_path.iterdir())) == 2, "its launcher lives"
        process.kill()
        process.wait()
    leftovers.remove_abandoned(tmp_path.iterdir())
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_somebody_cleared_away_before_it_was_locked_is_made_anew(tmp_path: Path) -> None:
    names = iter(("first", "second"))

    def make() -> Path:
        path = tmp_path / next(names)
        path.touch()
        return path

    real = leftovers._open

    def slow(path: Path) -> int:
        descriptor = real(path)
        if path.name == "first":
            path.unlink()
        return descriptor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leftovers, "_open", slow)
        assert leftovers.keep(make).name == "second"
    leftovers.remove_all()
    assert list(tmp_path.iterdir()) == []
