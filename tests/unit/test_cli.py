"""The `clap-zero` command: one line for what goes wrong, the exit code of its kind, nothing heavy imported early."""

from __future__ import annotations

import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

import clap_zero
from clap_zero import cli
from clap_zero.errors import CheckpointError, DataError

ZERO2 = str(Path(__file__).parents[2] / "ds_configs" / "zero2.json")


def test_version_and_help_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"clap-zero {clap_zero.__version__}\n"
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in cli.COMMANDS)
    assert cli.main([]) == 2


@pytest.mark.parametrize("command", ["pack", "check", "train", "eval", "export", "check-config", "doctor", "bench"])
def test_every_command_has_help(command: str) -> None:
    """In a process of its own: a training ends its process."""
    script = "import sys; from clap_zero.cli import main; sys.exit(main(sys.argv[1:]))"
    words = [sys.executable, "-c", script, command, "--help"]
    result = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "usage: clap-zero" in result.stdout


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["evl", "x"], "did you mean eval?"),
        (["eval"], "RUN"),
        (["eval", "x", "--stp", "3"], "did you mean --step?"),
        (["eval", "x", "--step", "last"], "latest or best"),
        (["eval", "x", "--batch_size", "0"], "at least 1"),
        (["export", "x"], "DIR"),
        (["pack"], "required"),
        (
            ["pack", "--manifst", "x", "--ouut", "y"],
            "--manifst: did you mean --manifest?, unknown argument --ouut: did",
        ),
        (["pack", "--folder", "x", "--out", "y", "z", "w"], "unexpected argument z and 1 more"),
        (["bench"], "clap-zero bench: loader or objective"),
        (["bench", "loadr", "x"], "clap-zero bench loadr: loader or objective"),
        (["check-config", "--ds_config", ZERO2, "--world-size", "0"], "--world-size 0"),
        (["check-config", "--world-size"], "needs a value"),
        (["doctor", "--ranks"], "--ranks needs a value"),
        (["doctor", "--ranks", "two"], "--ranks two: a whole number"),
        (["doctor", "--host_file", "x"], "--host_file"),
        (["check-config", "--device", "gpu", "--ds_config", ZERO2], "cpu and cuda are possible"),
        (["check-config", "--memory-gb", "x", "--ds_config", ZERO2], "--memory-gb x"),
        (["check-config", "--ds_config", ZERO2, "--train.max_stepz", "1"], "did you mean --train.max_steps?"),
        (["check-config", "--ds_config", "/no.json"], "/no.json: cannot be read"),
    ],
)
def test_usage_errors_are_one_line_and_exit_2(argv: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("clap-zero: error: ")
    assert part in error
    assert error.count("\n") == 1
    assert "Traceback" not in error


def test_check_config_prints_the_arithmetic(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["check_config", "--world_size=2", "--num-samples", "70", "--device", "cpu", "--ds-config", ZERO2]
    assert cli.main(argv) == 0
    out = capsys.readouterr().out
    assert "micro 8 x accumulation 1 x world 2 = global 16" in out
    assert "run directory runs/tiny-zero2" in out
    assert cli.main([*argv, "--ds.train_micro_batch_size_per_gpu", "4"]) == 0
    assert "micro 4 x accumulation 2 x world 2 = global 16" in capsys.readouterr().out


def fake(monkeypatch: pytest.MonkeyPatch, module: str, **functions: object) -> None:
    stand_in = types.ModuleType(module)
    for name, function in functions.items():
        setattr(stand_in, name, function)
    monkeypatch.setitem(sys.modules, module, stand_in)


def test_commands_call_one_function_with_their_arguments(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[object] = []
    fake(monkeypatch, "clap_zero.evaluation.from_run", eval_run=lambda *a, **k: calls.append((a, k)))
    fake(monkeypatch, "clap_zero.checkpoint.export", export_run=lambda *a, **k: calls.append((a, k)) or a[1])
    assert cli.main(["eval", "my run", "--step=12", "--val", "a b.tar", "--val", "c"]) == 0
    assert cli.main(["eval", "r", "--batch_size", "4"]) == 0
    assert cli.main(["export", "r", "out", "--overwrite", "--step", "best"]) == 0
    assert calls == [
        ((Path("my run"),), {"step": 12, "val": ["a b.tar", "c"], "batch_size": None}),
        ((Path("r"),), {"step": "latest", "val": None, "batch_size": 4}),
        ((Path("r"), Path("out")), {"step": "best", "overwrite": True}),
    ]
    assert capsys.readouterr().out.endswith("exported to out\n")


def test_train_gets_its_flags_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []
    fake(monkeypatch, "clap_zero.train", run_and_exit=calls.append)
    argv = ["--ds_config", "x", "--wandb.name", "it's a 72\" test=1", "--data.train", ""]
    assert cli.main(["train", *argv]) == 0
    assert calls == [argv]


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (DataError("no shards"), 3, "clap-zero: error: no shards\n"),
        (CheckpointError("gone\nand more"), 4, "clap-zero: error: gone\nclap-zero: error: and more\n"),
        (KeyboardInterrupt(), 130, "clap-zero: interrupted\n"),
    ],
)
def test_errors_have_the_exit_code_of_their_kind(
    error: BaseException, code: int, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    fake(monkeypatch, "clap_zero.evaluation.from_run", eval_run=fail)
    assert cli.main(["eval", "run"]) == code
    assert capsys.readouterr().err == line


def test_nothing_heavy_before_a_command_is_known() -> None:
    code = (
        "import sys; from clap_zero.cli import main; main(['--help']); "
        "print({'torch', 'deepspeed', 'transformers', 'pydantic'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("set()")


@pytest.mark.parametrize("words", ["-m clap_zero.cli pack", "-m clap_zero.cli bench loader", "-m clap_zero.train"])
def test_help_does_not_wait_for_torch(words: str) -> None:
    """Only what imports torch takes seconds; `-X importtime` tells every import."""
    command = [sys.executable, "-X", "importtime", *words.split(), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "usage: " in done.stdout
    assert not re.search(r"\| +(torch|deepspeed|transformers)$", done.stderr, re.MULTILINE)


def test_help_into_a_pipe_that_closes_early_is_no_error() -> None:
    command = f"{sys.executable} -m clap_zero.train --help | head -1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
