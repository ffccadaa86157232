"""W&B never stops training: whatever it does, the hook warns and the run goes on."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clap_zero.hooks.wandb import WandbHook

TRAINER: Any = SimpleNamespace(state=SimpleNamespace(step=0))


def make(run_dir: Path, mode: str = "auto") -> WandbHook:
    return WandbHook(run_dir, mode=mode, settings={"project": "test"}, config={"run": {"seed": 1}}, attempt=1)


@pytest.fixture
def no_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def finish(hook: WandbHook) -> None:
    hook.on_close(TRAINER)
    assert hook._thread is None or not hook._thread.is_alive()


def test_without_a_key_the_run_is_kept_offline_under_one_id(tmp_path: Path, no_key: None) -> None:
    for _ in range(2):  # a restart goes on in the same W&B run, in a folder of its own
        hook = make(tmp_path)
        hook.on_start(TRAINER)
        hook.on_evaluate(TRAINER, {"audio_to_text.R@1": 0.5, "name": "not a figure"})
        finish(hook)
        time.sleep(1.1)  # folders are named by the second
    run_id = (tmp_path / "wandb" / "run_id").read_text().strip()
    folders = sorted(path.name for path in (tmp_path / "wandb").glob("offline-run-*"))
    assert len(folders) == 2 and all(name.endswith(run_id) for name in folders)


def test_disabled_starts_nothing(tmp_path: Path) -> None:
    hook = make(tmp_path, mode="disabled")
    hook.on_start(TRAINER)
    hook.on_evaluate(TRAINER, {"x": 1.0})
    finish(hook)
    assert not (tmp_path / "wandb").exists()


def test_not_installed_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    hook = make(tmp_path)
    hook.on_start(TRAINER)
    finish(hook)
    hook.on_evaluate(TRAINER, {"x": 1.0})
    assert "training goes on without it" in capsys.readouterr().out


def test_an_init_that_raises_is_a_warning(
    tmp_path: Path, no_key: None, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    (tmp_path / "wandb").write_text("a file where the folder should be")
    hook = make(tmp_path)
    hook.on_start(TRAINER)
    finish(hook)
    assert "training goes on without it" in capsys.readouterr().out


def test_an_init_that_never_returns_does_not_hold_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setattr("clap_zero.hooks.wandb.CLOSE_TIMEOUT_S", 0.3)
    monkeypatch.setattr(WandbHook, "_log_all", lambda self: time.sleep(2))
    hook = make(tmp_path)
    hook.on_start(TRAINER)
    started = time.monotonic()
    hook.on_close(TRAINER)
    assert time.monotonic() - started < 1.5
    assert "no end after" in capsys.readouterr().out


def test_a_command_line_with_credentials_is_not_collected(tmp_path: Path, no_key: None, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train", "--data.train", "https://host/0.tar?sig=SECRET"])
    hook = WandbHook(tmp_path, mode="offline", settings={"project": "test"}, config={}, attempt=1, hide_command=True)
    hook.on_start(TRAINER)
    finish(hook)
    written = b"".join(path.read_bytes() for path in (tmp_path / "wandb").rglob("*") if path.is_file())
    # Without hide_command W&B writes it, soon after the start and not always before the end.
    assert written and b"SECRET" not in written
