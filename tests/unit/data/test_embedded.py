from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from clap_zero.data import embedded
from clap_zero.data.index import load_index
from clap_zero.errors import DataError
from tests.unit.data.shard_files import audio_bytes


@pytest.fixture
def sounds(tmp_path, monkeypatch):
    """Three sounds in the place of the real ones."""
    directory = tmp_path / "sounds"
    directory.mkdir()
    lines = ["file,caption,caption_2,split,source,license,attribution"]
    for n, split in enumerate(["train", "train", "test"]):
        (directory / f"{n}.ogg").write_bytes(audio_bytes(n, kind="OGG"))
        lines.append(f"{n}.ogg,sound {n},other {n},{split},s,CC0,a")
    (directory / "manifest.csv").write_text("\n".join(lines))
    monkeypatch.setattr(embedded, "_PLACES", (tmp_path / "none", directory))
    return directory


def test_packed_once_and_reused(sounds, tmp_path):
    train, test = embedded.embedded_sounds(tmp_path / "data", workers=1)
    assert load_index([str(train)]).num_samples == 2 and load_index([str(test)]).num_samples == 1
    before = (train / "0.tar").stat().st_mtime_ns
    assert embedded.embedded_sounds(tmp_path / "data", workers=1) == (train, test)
    assert (train / "0.tar").stat().st_mtime_ns == before


def test_packed_again_when_killed_or_changed(sounds, tmp_path):
    train, _ = embedded.embedded_sounds(tmp_path / "data", workers=1)
    (tmp_path / "data" / "source.sha256").unlink()  # the last thing written
    embedded.embedded_sounds(tmp_path / "data", workers=1)
    (sounds / "3.ogg").write_bytes(audio_bytes(3, kind="OGG"))
    with (sounds / "manifest.csv").open("a") as file:
        file.write("\n3.ogg,new,newer,train,s,CC0,a")
    embedded.embedded_sounds(tmp_path / "data", workers=1)
    assert json.loads((train / "sizes.json").read_text()) == {"0.tar": 3}


def test_of_two_callers_one_packs_and_the_other_waits(sounds, tmp_path, monkeypatch):
    calls = []

    def slow(options):
        calls.append(options.out)
        time.sleep(0.3)
        for split in ("train", "test"):
            (options.out / split).mkdir(exist_ok=True)
            (options.out / split / "sizes.json").write_text("{}")
        return SimpleNamespace(splits={"train": None, "test": None}, num_rejected=0)

    monkeypatch.setattr(embedded, "pack", slow)
    with ThreadPoolExecutor(2) as threads:
        found = [threads.submit(embedded.embedded_sounds, tmp_path / "data", workers=1) for _ in range(2)]
        assert found[0].result() == found[1].result()
    assert len(calls) == 1


def test_default_place_is_below_the_working_directory(sounds, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train, test = embedded.embedded_sounds(workers=1)
    assert train.as_posix() == "data/embedded_sounds/train" and test.is_dir()


def test_damaged_or_absent_sounds_are_an_error(sounds, tmp_path, monkeypatch):
    (sounds / "0.ogg").write_bytes(b"junk")
    with pytest.raises(DataError, match="are damaged"):
        embedded.embedded_sounds(tmp_path / "data", workers=1)
    monkeypatch.setattr(embedded, "_PLACES", (tmp_path / "none",))
    with pytest.raises(DataError, match="not installed"):
        embedded.embedded_sounds(tmp_path / "data", workers=1)
