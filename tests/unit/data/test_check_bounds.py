"""The commands that read shards as training would: they refuse what training refuses, and say things once."""

from __future__ import annotations

import pytest

from clap_zero import cli
from tests.unit.data.shard_files import write_split


@pytest.mark.parametrize(
    ("command", "flag", "value"),
    [
        ("check", "--max-seconds", "0.5"),
        ("check", "--max-seconds", "4000"),
        ("check", "--max-seconds", "nan"),
        ("check", "--max-caption-tokens", "3"),
        ("check", "--max-caption-tokens", "513"),
        ("check", "--max-bad-fraction", "1.5"),
        ("check", "--caption-key", ""),
        ("check", "--retries", "101"),
        ("bench loader", "--max-seconds", "0.5"),
        ("bench loader", "--shuffle-shards", "0"),
        ("bench loader", "--cache-bytes", "0"),
    ],
)
def test_bounds_are_those_of_the_run_config(tmp_path, capsys, command, flag, value):
    assert cli.main([*command.split(), str(tmp_path), flag, value]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"clap-zero: error: {flag} {value}: it should") and "data." in error, error
    assert error.count("\n") == 1


def test_a_shard_that_cannot_be_had_is_said_once(tmp_path, capsys, caplog):
    """It is looked for twice: as training would, and then without it, to check the others."""
    write_split(tmp_path / "train", [2], declare=False)
    words = ["check", str(tmp_path / "train"), "pipe:false", "--allow-pipe", "--retries", "0"]
    assert cli.main([*words, "--workers", "1", "--cache-dir", str(tmp_path / "cache")]) == 3
    notes = [record.getMessage() for record in caplog.records]
    assert len(notes) == len(set(notes)) == 2, notes
    assert notes[0] == "pipe:false has no count in a sizes.json beside it: run now to be counted"
    assert capsys.readouterr().err.startswith(
        "clap-zero: error: training on these shards would stop: pipe:false: the command ended with exit code 1;"
    )
