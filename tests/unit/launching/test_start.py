"""The real `deepspeed` program through the installed .pth: a command that cannot run, or be checked, starts nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clap_zero.launching import start

BIN = Path(sys.executable).parent
needs_pdsh = pytest.mark.skipif(shutil.which("pdsh") is None, reason="pdsh is not installed (apt-get install pdsh)")


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("/nope", "no readable hostfile at /nope: there is no such file; nothing was started"),
        ("folder", "no readable hostfile at folder: it is a folder; nothing was started"),
        ("empty", "empty names no host: lines look like 'worker-1 slots=8'; nothing was started"),
        ("bad", "bad:1: 'w2 lots=8' is not of the form 'worker-1 slots=8'; nothing was started"),
    ],
)
def test_l01_the_real_program_starts_nothing(tmp_path: Path, what: str, message: str) -> None:
    """Through the installed .pth, before DeepSpeed is imported."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty").touch()
    (tmp_path / "bad").write_text("w2 lots=8\n")
    words = [str(BIN / "deepspeed"), "--hostfile", what, "-m", "clap_zero.train"]
    begin = time.monotonic()
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (5, "")
    assert done.stderr == f"clap_zero: error: {message}\n"
    assert time.monotonic() - begin < 3


def deepspeed(*words: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(BIN / "deepspeed"), *words], capture_output=True, text=True, check=False, cwd=cwd,
        env=os.environ | environment, timeout=60,
    )  # fmt: skip


def test_unknown_flags_are_refused_before_any_rank_starts(tmp_path: Path) -> None:
    """Once and all of them; each rank would import torch before it can say the same."""
    done = deepspeed("--num_gpus", "2", "-m", "clap_zero.train", "--lr", "3", "--train.sed", "1", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        "clap_zero: error: unknown flag --lr: did you mean --train.learning_rate?",
        "clap_zero: error: unknown flag --train.sed: did you mean --train.seed?",
    ]


def test_help_is_given_once_and_starts_no_rank(tmp_path: Path) -> None:
    done = deepspeed("--num_gpus", "2", "-m", "clap_zero.train", "--help", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("usage: clap-zero train") == 1 and "--train.max_steps N" in done.stdout


@needs_pdsh
def test_without_ssh_the_real_program_starts_nothing(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("far.invalid slots=1\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "pdsh").symlink_to(str(shutil.which("pdsh")))
    done = deepspeed(
        "--hostfile", "hosts", "--launcher", "pdsh", "-m", "clap_zero.train", cwd=tmp_path, PATH=str(tmp_path / "bin")
    )
    assert (done.returncode, done.stdout) == (5, "")
    assert done.stderr == (
        "clap_zero: error: ssh is not installed here, and pdsh reaches the hosts through it "
        "(apt-get install openssh-client)\n"
    )


def test_what_nobody_foresaw_starts_nothing(tmp_path: Path) -> None:
    """A working directory that is gone: one line, no traceback, and DeepSpeed does not go on unchecked."""
    (tmp_path / "hosts").write_text("far.invalid slots=1\n")
    gone = tmp_path / "gone"
    gone.mkdir()
    script = 'rmdir "$PWD"; exec "$0" --hostfile ../hosts --no_ssh --node_rank 0 --master_addr x -m clap_zero.train'
    script = script.replace("../hosts", str(tmp_path / "hosts")).replace("--no_ssh --node_rank 0", "--no_ssh_check")
    done = subprocess.run(
        ["bash", "-c", script, str(BIN / "deepspeed")], capture_output=True, text=True, check=False, cwd=gone,
        env=os.environ | {"MY_TOKEN": "s3cret", "CLAP_ZERO_FORWARD": "MY_TOKEN"}, timeout=60,
    )  # fmt: skip
    assert done.returncode == 5, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("clap_zero: error: the command could not be checked: FileNotFoundError")
    assert "s3cret" not in done.stderr


def test_other_modules_and_other_programs_are_left_alone(tmp_path: Path) -> None:
    script = tmp_path / "deepspeed"
    script.write_text("from deepspeed.launcher.runner import main\n")
    for argv in (
        [str(script), "--num_gpus", "2", "--module", "pkg.mod", "clap_zero.train"],
        [str(script), "--num_gpus", "2", "clap_zero.train"],
        [str(tmp_path / "other"), "--module", "clap_zero.train"],
        [str(script), "--unknown", "--module", "clap_zero.train"],
    ):
        before = list(argv)
        start.put_right(argv)
        assert argv == before
