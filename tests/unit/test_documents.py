"""What the documents tell a reader to type can be typed, and the run config that they show is one."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from clap_zero import cli
from clap_zero.config.flags import read_flags
from clap_zero.config.own_flags import take_own
from clap_zero.planning.check_config import OWN_FLAGS
from clap_zero.preflight import doctor
from tests.unit.test_every_flag import COMMANDS, called_with

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TRAINING = re.compile(r"^(?:deepspeed|torchrun|accelerate|srun|python)\b.*?-m clap_zero\.train(?P<flags>.*)|")
SCRIPT = re.compile(r"^(?:sbatch .*)?launch/(?:slurm\.sbatch|single_node\.sh|multi_node\.sh hostfile)(?P<flags>.*)")


def code_lines(page: Path) -> Iterator[str]:
    """Lines of fenced and indented blocks, each with the lines that go on with it, without comments and prompts."""
    fenced, gathered = False, ""
    for line in page.read_text("utf-8").splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            gathered += re.sub(r"\s#\s.*", "", line).strip()
            if gathered.endswith("\\"):
                gathered = gathered[:-1]
                continue
            yield re.sub(r"^(?:[A-Z_]+=\S+ )*", "", gathered)
            gathered = ""


def commands() -> list[str]:
    return sorted({line for page in PAGES for line in code_lines(page)})


def words_of(text: str) -> list[str]:
    return shlex.split(re.sub(r"\$\w+", "3", text.partition(">")[0]))


TYPED = [
    (line, match["flags"])
    for line in commands()
    for match in (TRAINING.match(line), SCRIPT.match(line))
    if match is not None and match["flags"] is not None
]


@pytest.mark.parametrize("flags", [flags for _, flags in TYPED], ids=[line[:60] for line, _ in TYPED])
def test_every_training_that_a_page_shows_has_flags_that_are_there(flags: str) -> None:
    read = read_flags(words_of(flags))
    assert read.wants_help or read.values or read.config


OURS = [line for line in commands() if line.startswith("clap-zero ")]


@pytest.mark.parametrize("line", OURS)
def test_every_command_that_a_page_shows_is_understood(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, *words = words_of(line.removeprefix("clap-zero "))
    if "--help" in words or "--schema" in words:
        assert cli.main([name, *words]) == 0
    elif name in ("check-config", "doctor", "train"):
        own = {"check-config": OWN_FLAGS, "doctor": doctor._OWN, "train": {}}[name]
        read_flags(take_own(words, own)[1])
    else:
        command = f"{name} {words.pop(0)}" if name == "bench" else name
        called_with(command, words, monkeypatch)


def test_pages_show_every_command() -> None:
    shown = {" ".join(line.split()[1:3]) if " bench " in line else line.split()[1] for line in OURS}
    assert {*COMMANDS, "check-config", "doctor"} - {"bench objective"} <= shown, "no page shows how to type it"


def test_the_run_config_that_the_readme_shows_is_the_one_of_the_examples(capsys: pytest.CaptureFixture[str]) -> None:
    path = ROOT / "examples" / "my_run.yaml"
    (block,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    assert yaml.safe_load(block) == yaml.safe_load(path.read_text("utf-8"))
    words = ["--ds_config", str(ROOT / "ds_configs" / "zero2.json"), "--config", str(path), "--num-samples", "100000"]
    assert cli.main(["check-config", *words, "--world-size", "8", "--device", "cuda"]) == 0
    out = capsys.readouterr().out
    assert "world 8 = global 1024" in out and "run directory runs/mine" in out
