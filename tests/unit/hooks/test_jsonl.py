from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from clap_zero.errors import ConfigError
from clap_zero.hooks.jsonl import KeysHook, LineFile


class FullDisk:
    """Full for two lines, then there is room again."""

    def __init__(self, file) -> None:
        self.file, self.num_refused = file, 0

    def write(self, data: bytes) -> int:
        if self.num_refused < 2:
            self.num_refused += 1
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.file.write(data)

    def close(self) -> None:
        self.file.close()


def test_a_torn_last_line_does_not_swallow_the_next(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    lines = LineFile(path)
    lines.append({"step": 2})
    lines.close()
    assert path.read_text().splitlines() == ['{"step": 1}', '{"step": 2, "lo', '{"step": 2}']


def test_lines_are_on_disk_as_soon_as_they_are_appended(tmp_path: Path) -> None:
    lines = LineFile(tmp_path / "metrics.jsonl")
    lines.append({"key": "naïve 音"})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"key": "naïve 音"}
    lines.close()


def test_a_full_disk_costs_lines_and_not_the_run(tmp_path: Path, capsys) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = LineFile(path)
    lines._file = FullDisk(lines._file)
    for step in range(1, 5):
        lines.append({"step": step})
    lines.close()
    assert capsys.readouterr().out.count("No space left on device") == 1
    assert [json.loads(line) for line in path.read_text().split("\n") if line] == [{"step": 3}, {"step": 4}]


def test_keys_that_are_no_utf8_and_figures_that_are_not_finite_can_be_written(tmp_path: Path) -> None:
    lines = LineFile(tmp_path / "keys.jsonl")
    lines.append({"keys": ["train/0.tar::a\udcff"], "loss": float("nan"), "eval": {"R@1": [float("inf"), 0.5]}})
    lines.close()
    (line,) = (tmp_path / "keys.jsonl").read_text().splitlines()
    assert json.loads(line) == {"keys": ["train/0.tar::a\udcff"], "loss": None, "eval": {"R@1": [None, 0.5]}}


def test_keys_that_cannot_be_logged_are_a_wrong_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--data\.log_keys .*file/keys cannot be written: Not a directory"):
        KeysHook(tmp_path / "file" / "keys", rank=0, attempt=1)
