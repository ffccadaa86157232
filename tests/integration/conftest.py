from __future__ import annotations

import csv
import socket
from pathlib import Path

import pytest

from clap_zero.data.pack import PackOptions, pack
from clap_zero.data.pack_sources import Columns

NUM_TRAIN, NUM_TEST = 40, 7


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory, root: Path) -> tuple[Path, Path]:
    """A few of the embedded sounds as shards of 16: the directories of train and test."""
    sounds = root / "examples" / "sounds"
    folder = tmp_path_factory.mktemp("shards")
    with (sounds / "manifest.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    chosen = [row for row in rows if row["split"] == "train"][::9][:NUM_TRAIN]
    chosen += [row for row in rows if row["split"] == "test"][::9][:NUM_TEST]
    manifest = folder / "manifest.csv"
    with manifest.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows({**row, "file": str(sounds / row["file"])} for row in chosen)
    pack(
        PackOptions(
            out=folder / "out",
            manifest=manifest,
            columns=Columns(audio="file", split="split"),
            shard_size=16,
            workers=1,
            progress=False,
        )
    )
    return folder / "out" / "train", folder / "out" / "test"


@pytest.fixture
def port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
