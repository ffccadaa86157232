"""DeepSpeed's command line, read without DeepSpeed."""

from __future__ import annotations

import argparse
import subprocess
import sys

import pytest

from clap_zero.launching import options

PROGRAM = """
import argparse, json
made = []
argparse.ArgumentParser.parse_args = lambda self, args=None: made.append(self)
from deepspeed.launcher import runner
runner.parse_args()
print(json.dumps(sorted(
    [sorted(one.option_strings), one.nargs == 0] for one in made[0]._actions if one.option_strings
)))
"""


def test_the_tables_hold_every_option_of_the_installed_deepspeed() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    parser: argparse.ArgumentParser = options.parser()
    ours = sorted([sorted(one.option_strings), one.nargs == 0] for one in parser._actions if one.option_strings)
    import json

    assert json.loads(done.stdout.splitlines()[-1]) == ours


@pytest.mark.parametrize(
    "line",
    [
        "--num_gpus=2 --module pkg.mod --num_gpus 3",
        "--hostfile=h --include=w1@w2:0,2 --no_ssh --module pkg.mod -x",
        "--launcher_args=--mca=x --module pkg.mod",
    ],
)
def test_a_command_is_read_and_written_again(line: str) -> None:
    command = options.read(line.split())
    assert command is not None
    assert command.as_argv() == line.split()


def test_short_and_abbreviated_options_are_known() -> None:
    command = options.read(["-H", "h", "--num_g", "2", "-i", "w1", "--module", "m", "a", "b"])
    assert command is not None
    assert dict(command.given) == {"hostfile": "h", "num_gpus": 2, "include": "w1", "module": True}
    assert (command.program, command.arguments) == ("m", ("a", "b"))


@pytest.mark.parametrize("line", ["", "--new_option 1 m", "--num_gpus x m", "--help", "--num_gpus"])
def test_what_is_not_understood_is_left_to_deepspeed(line: str) -> None:
    assert options.read(line.split()) is None


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["--train.seed", "1", "--master_port", "2"], "--master_port"),
        (["--master-port=2"], "--master-port"),
        (["--hostfile"], "--hostfile"),
        (["--run_dir=--master_port", "master_port"], None),
    ],
)
def test_l10_options_of_the_launcher_after_the_module_are_found(arguments: list[str], found: str | None) -> None:
    assert options.misplaced(arguments) == found
