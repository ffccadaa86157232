"""The commands that read shards as training would refuse what training refuses."""

from __future__ import annotations

import pytest

from clap_zero import cli


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
