"""The shell functions that the launch scripts share, run by a real bash, without an installation."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PREAMBLE = f'. "{ROOT}/launch/_env.sh"\nPY="{sys.executable}"\n'


def bash(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", "-c", PREAMBLE + script]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60, env=os.environ | environment
    )


@pytest.mark.parametrize("path", sorted([*ROOT.glob("launch/*.s*"), ROOT / ".ci" / "run"]), ids=lambda p: p.name)
def test_scripts_parse(path: Path) -> None:
    assert subprocess.run(["bash", "-n", str(path)], check=False).returncode == 0


@pytest.mark.parametrize("code", [0, 1, 2, 5, 75, 143])
def test_without_word_from_the_ranks_the_code_is_the_launchers(code: int) -> None:
    done = bash(f"run_job bash -c 'exit {code}'")
    assert done.returncode == code, done.stderr


@pytest.mark.parametrize(
    ("launcher", "ranks", "code"),
    [
        (0, "0 0", 0),
        (1, "75 75", 75),
        (247, "5 running", 5),
        (5, "5 2", 2),
        (1, "1 5", 1),
        (1, "3 1", 3),
        (5, "4 5 1", 4),
        (0, "0 running", 5),
        (0, "5 0", 5),
        (247, "0 0", 247),
    ],
)
def test_the_ranks_know_better_than_the_launcher(launcher: int, ranks: str, code: int) -> None:
    writes = "".join(f"echo {value} >$CLAP_ZERO_EXIT_CODES/rank{i}; " for i, value in enumerate(ranks.split()))
    done = bash(f"sleep() {{ :; }}; run_job bash -c '{writes} exit {launcher}'")
    assert done.returncode == code, done.stderr


def test_codes_leave_no_folder_behind(tmp_path: Path) -> None:
    assert bash("run_job true", TMPDIR=str(tmp_path)).returncode == 0
    assert list(tmp_path.iterdir()) == []


RANK = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
os.write(1, b"ready\\n")  # in one piece: two ranks write
time.sleep(60)
"""

LAUNCHER = f"""
import subprocess, sys, time
ranks = [subprocess.Popen([sys.executable, "-c", {RANK!r}]) for _ in range(2)]
sys.exit(max(rank.wait() for rank in ranks))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_to_the_script_reaches_the_ranks_and_gives_their_code(tmp_path: Path, number: int) -> None:
    """The launcher is a process whose command line holds torchrun, its children are the ranks."""
    (tmp_path / "torchrun").write_text(LAUNCHER)
    command = ["bash", "-c", PREAMBLE + f'run_job "$PY" -u "{tmp_path}/torchrun"; exit $?']
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as script:
        assert script.stdout is not None
        assert [script.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        script.send_signal(number)
        assert script.wait(timeout=30) == 75


def test_the_second_signal_ends_everything(tmp_path: Path) -> None:
    (tmp_path / "torchrun").write_text(LAUNCHER.replace("sys.exit(75)", "None"))
    command = ["bash", "-c", PREAMBLE + f'run_job "$PY" -u "{tmp_path}/torchrun"; exit $?']
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as script:
        assert script.stdout is not None
        assert [script.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        script.send_signal(signal.SIGTERM)
        assert script.stdout.readline().startswith("stopping")
        time.sleep(1)
        script.send_signal(signal.SIGTERM)
        assert script.wait(timeout=30) == 137


@pytest.mark.parametrize(
    ("text", "message"),
    [("# comment\n\n w1 slots=2   \r\n", None), ("w1 slots=2\nw2 lots=8\n", ":2: 'w2 lots=8' is not of the form")],
)
def test_hostfiles_are_checked_before_anything_is_installed(tmp_path: Path, text: str, message: str | None) -> None:
    file = tmp_path / "my hostfile"
    file.write_text(text)
    done = bash(f'check_hostfile "{file}"')
    assert done.returncode == (0 if message is None else 5)
    assert done.stderr == "" if message is None else f"{file}{message}" in done.stderr


@pytest.mark.parametrize("argument", ["/nope", "/tmp"])
def test_a_missing_hostfile_starts_nothing(argument: str) -> None:
    done = subprocess.run(
        ["bash", str(ROOT / "launch" / "multi_node.sh"), argument], capture_output=True, text=True, check=False
    )
    assert done.returncode == 5
    assert f"no readable hostfile at {argument}" in done.stderr


def test_an_old_python_is_refused_with_the_way_out(tmp_path: Path) -> None:
    """Every python3 on PATH is one that says that it is too old."""
    for name in ("python3", "python3.11", "python3.12", "python3.13"):
        fake = tmp_path / name
        fake.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.9.2"\nexit 1\n')
        fake.chmod(0o755)
    done = bash("install_debian() { return 1; }; setup_locked", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 5
    assert "Python 3.11 or newer is needed; found Python 3.9.2" in done.stderr


def test_a_checkout_under_another_name_keeps_its_environment(tmp_path: Path) -> None:
    """A link, an automount: the same folder, whose environment other jobs are running in."""
    home, link = tmp_path / "home", tmp_path / "link"
    for folder in ("launch", "packaging", ".venv/bin"):
        (home / folder).mkdir(parents=True)
    for name in ("launch/_env.sh", "pyproject.toml", "hatch_build.py"):
        (home / name).write_bytes((ROOT / name).read_bytes())
    (home / "packaging" / "x.pth").touch()
    (home / ".venv" / "bin" / "python").symlink_to(sys.executable)
    (home / ".venv" / "mine").touch()
    link.symlink_to(home)
    # What a checkout that was used under the other name has left.
    stamp = '. home/launch/_env.sh; { echo "$1"; wanted "$PY" | tail -n +2; } >"$STAMP"'
    check = ". link/launch/_env.sh; usable_venv() { :; }; make_venv() { exit 9; }; setup_locked; echo kept"
    for stamped in (home, link):
        subprocess.run(["bash", "-c", stamp, "bash", str(stamped)], check=True, cwd=tmp_path)
        done = subprocess.run(["bash", "-c", check], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (0, "kept\n"), done.stderr
    subprocess.run(["bash", "-c", stamp, "bash", "/somewhere/else"], check=True, cwd=tmp_path)
    moved = check.replace("usable_venv() { :; }", "usable_venv() { false; }")
    assert subprocess.run(["bash", "-c", moved], cwd=tmp_path, check=False).returncode == 9
    assert not (home / ".venv" / "mine").exists(), "a moved environment is made anew"


PIP = """\
Obtaining file:///checkout
Collecting torch>=2.6 (from clap-zero==0.1.0)
  Downloading torch-2.14.1-cp311-cp311-manylinux_2_28_x86_64.whl.metadata (30 kB)
  Downloading https://example.org/a-b/torch-2.14.1-cp311-cp311-manylinux_2_28_x86_64.whl (906.4 MB)
Using cached nvidia_cublas_cu12-12.8.4.1-py3-none-manylinux_2_27_x86_64.whl (1.2 GB)
Downloading numpy-2.3.1-cp311-cp311-manylinux_2_28_x86_64.whl (16.9 MB)
Installing collected packages: mpmath, torch, numpy
Successfully installed mpmath-1.3.0 numpy-2.3.1 torch-2.14.1
"""


def test_an_installation_tells_its_large_parts_and_keeps_its_exit_code(tmp_path: Path) -> None:
    (tmp_path / "pip").write_text(PIP)
    done = bash(f"{{ cat {tmp_path}/pip; sleep 1.5; exit 3; }} | pip_progress 1")
    assert done.returncode == 3
    lines = done.stdout.splitlines()
    assert lines[:3] == ["  Downloading torch (906 MB)", "  Using cached nvidia_cublas_cu12 (1 GB)", "  Unpacking"]
    assert len(lines) > 3 and all(re.fullmatch(r"  still at it after \d+ s", line) for line in lines[3:])
