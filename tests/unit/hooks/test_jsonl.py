from __future__ import annotations

import errno
import json
from pathlib import Path

from clap_zero.hooks.jsonl import LineFile


class FullDisk:
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def close(self) -> None:
        pass


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


def test_a_full_disk_ends_the_lines_and_not_the_run(tmp_path: Path, capsys) -> None:
    lines = LineFile(tmp_path / "metrics.jsonl")
    lines.close()
    lines._file = FullDisk()
    lines.append({"step": 1})
    lines.append({"step": 2})
    assert capsys.readouterr().out.count("No space left on device") == 1
