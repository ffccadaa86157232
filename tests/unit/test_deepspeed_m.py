"""The .pth line that lets `deepspeed ... -m package.module` stand for `--module`, run with many command lines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

PTH = Path(__file__).resolve().parents[2] / "packaging" / "clap_zero_deepspeed_m.pth"
LAUNCHER = "#!/bin/python3\nfrom deepspeed.launcher.runner import main\n"


def run_line(argv: list[str] | None, *, times: int = 1) -> list[str] | None:
    """Run the line as Python's start-up does, with this sys.argv, and return what it made of it."""
    before = sys.argv
    try:
        if argv is None:
            del sys.argv
        else:
            sys.argv = list(argv)
        for _ in range(times):
            exec(PTH.read_text().splitlines()[0], {})
        return getattr(sys, "argv", None)
    finally:
        sys.argv = before


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> str:
    script = tmp_path_factory.mktemp("bin") / "deepspeed"
    script.write_text(LAUNCHER)
    return str(script)


def test_it_is_one_line_that_python_executes() -> None:
    lines = PTH.read_text().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("import ")


@pytest.mark.parametrize(
    "before",
    [
        "",
        "--num_gpus 2",
        "--num_gpus=2",
        "--num_g 2",
        "-q --no_ssh --no_ssh_check --force_multi --save_pid --no_local_rank",
        "--bind_cores_to_rank --bind_core_list 0-3",
        "--bind_cores",
        "-H hostfile -i worker-0@worker-1:0,2",
        "-Hhostfile",
        "--hostfile deepspeed --master_port 29501 --launcher pdsh",
        "--launcher_args=-m --log_level info",
    ],
)
@pytest.mark.parametrize("times", [1, 2])
def test_before_the_module_it_becomes_module(launcher: str, before: str, times: int) -> None:
    options, rest = before.split(), ["pkg.mod", "--ds_config", "x.json", "-m", "1"]
    assert run_line([launcher, *options, "-m", *rest], times=times) == [launcher, *options, "--module", *rest]


@pytest.mark.parametrize(
    "rest",
    [
        "train.py -m 3",
        "--num_gpus 2 train.py -m clap_zero.train",
        "--num_gpus=2 train.py --x -m y",
        "-q train.py -m y",
        "--module pkg.mod -m y",
        "--module -m pkg.mod",
        "--launcher_args -m train.py",
        "-- -m x",
        "- -m x",
        "--help",
        "-m",
        "",
    ],
)
def test_every_other_command_line_stays(launcher: str, rest: str) -> None:
    argv = [launcher, *rest.split()]
    assert run_line(argv) == argv


@pytest.mark.parametrize("program", ["/usr/bin/python", "pytest", "dsr", "mydeepspeed", "/x/deepspeed/run", "-m"])
def test_other_programs_are_left_alone(program: str) -> None:
    argv = [program, "-m", "clap_zero.train"]
    assert run_line(argv) == argv


@pytest.mark.parametrize("name", ["ds", "deepspeed.pt"])
def test_the_other_names_of_the_program(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(LAUNCHER)
    assert run_line([str(tmp_path / name), "-m", "pkg.mod"]) == [str(tmp_path / name), "--module", "pkg.mod"]


def test_other_programs_named_deepspeed_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "deepspeed").write_text("print('a rowing simulator')\n")
    (tmp_path / "folder" / "deepspeed").mkdir(parents=True)
    for program in (tmp_path / "deepspeed", tmp_path / "folder" / "deepspeed", tmp_path / "absent" / "deepspeed"):
        argv = [str(program), "-m", "clap_zero.train"]
        assert run_line(argv) == argv


@pytest.mark.parametrize("argv", [None, [], [""], ["deepspeed"]])
def test_a_short_or_absent_argv_is_no_error(argv: list[str] | None) -> None:
    assert run_line(argv) == argv


TOKENS = ["-m", "--module", "-q", "--num_gpus", "--num_gpus=2", "2", "train.py", "-", "--", "", "-H", "--no_ssh", "ä b"]


@settings(max_examples=300, deadline=None)
@given(rest=st.lists(st.sampled_from(TOKENS), max_size=6))
def test_it_changes_at_most_one_token_and_only_once(launcher: str, rest: list[str]) -> None:
    argv = [launcher, *rest]
    once = run_line(argv)
    assert once is not None
    assert len(once) == len(argv)
    changed = [(old, new) for old, new in zip(argv, once, strict=True) if old != new]
    assert changed in ([], [("-m", "--module")])
    assert run_line(argv, times=2) == once


def test_python_runs_the_line_at_start_up(tmp_path: Path) -> None:
    """A site folder with the .pth, a program named deepspeed: what it sees in sys.argv."""
    (tmp_path / PTH.name).write_bytes(PTH.read_bytes())
    script = tmp_path / "deepspeed"
    script.write_text(
        "import site, sys; sys.argv[:]  # deepspeed.launcher.runner\n"
        f"site.addsitedir({str(tmp_path)!r}); print(sys.argv[1:])\n"
    )
    command = [sys.executable, "-S", str(script), "--num_gpus", "2", "-m", "pkg.mod", "-m"]
    package = os.environ | {"PYTHONPATH": str(PTH.parents[1])}
    shown = subprocess.run(command, capture_output=True, text=True, check=True, env=package).stdout
    assert shown.strip() == "['--num_gpus', '2', '--module', 'pkg.mod', '-m']"
