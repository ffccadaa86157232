"""What the tests of packing share."""

from __future__ import annotations

import csv
import json
import tarfile
from pathlib import Path

from clap_zero.data.pack import PackOptions
from tests.unit.data.shard_files import audio_bytes


def options(tmp_path: Path, **change) -> PackOptions:
    return PackOptions(**{"out": tmp_path / "out", "progress": False, **change})


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
            writer.writeheader()
            writer.writerows(rows)
    else:
        path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def write_clips(directory: Path, names: list[str]) -> None:
    for number, name in enumerate(names):
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(audio_bytes(number, kind="WAV"))


def read_split(split: Path) -> list[tuple[str, bytes, dict]]:
    """(key, flac, json) of all pairs in the order of the shards, read with tarfile."""
    found = []
    for name in json.loads((split / "sizes.json").read_text()):
        with tarfile.open(split / name) as tar:
            data = {member.name: tar.extractfile(member).read() for member in tar}
        keys = [name.removesuffix(".flac") for name in data if name.endswith(".flac")]
        found += [(key, data[f"{key}.flac"], json.loads(data[f"{key}.json"])) for key in keys]
    return found


def rejected(split: Path) -> list[dict]:
    return [json.loads(line) for line in (split / "rejected.jsonl").read_text().splitlines()]
