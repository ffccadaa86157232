"""benchmarks/loader.py runs from a checkout, with the sounds that come with it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.long]


def test_compares_on_one_core_and_writes_the_figures(root, tmp_path):
    out = tmp_path / "figures.json"
    names = ["bare", "ours", "ours+features", "ours-logmel+features", "plain"]
    command = [sys.executable, "benchmarks/loader.py", "--clips", "32", "--rounds", "1", "--seconds", "0.3"]
    done = subprocess.run(
        [*command, "--only", *names, "--json", str(out)], cwd=root, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(out.read_text())
    assert record["clips"] == 32 and {row["problem"] for row in record["contenders"].values()} == {None}
    assert {row["name"] for row in record["contenders"].values()} == set(names)
    assert all(row["per_core"] > 0 for row in record["contenders"].values())
    assert len(record["ratios"]) == 6 and "ours+features / plain, workers 1" in done.stdout


def test_a_contender_that_does_not_run_is_named(root, tmp_path):
    command = [sys.executable, "benchmarks/loader.py", "--clips", "16", "--rounds", "1", "--seconds", "0.1"]
    done = subprocess.run(
        [*command, "--only", "bare", "open_clip", "--workers", "0", "--open_clip", str(tmp_path)],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "does not run: ModuleNotFoundError" in done.stdout
