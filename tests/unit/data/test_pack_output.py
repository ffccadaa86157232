"""Where a pack writes, and what it leaves when it ends early."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clap_zero.data import pack_writer
from clap_zero.data.pack import pack
from clap_zero.data.pack_scratch import remove_leftovers, scratch_name
from clap_zero.data.pack_sources import Columns
from clap_zero.errors import DataError
from tests.unit.data.packing import options, read_split, write_clips, write_rows
from tests.unit.data.shard_files import audio_bytes


def test_shards_have_the_size_and_the_order_does_not_depend_on_workers(tmp_path):
    names = [f"{n}.wav" for n in range(11)]
    write_clips(tmp_path / "in", names)
    (tmp_path / "in" / "5.wav").write_bytes(b"junk")
    manifest = write_rows(tmp_path / "in" / "m.csv", [{"file": name, "caption": name} for name in names])
    for workers in (1, 3):
        out = tmp_path / f"out{workers}"
        pack(options(tmp_path, manifest=manifest, shard_size=4, workers=workers, out=out))
    files = [sorted(p.name for p in (tmp_path / f"out{w}" / "train").iterdir()) for w in (1, 3)]
    assert (
        files[0] == files[1] == ["0.tar", "1.tar", "2.tar", "index.json", "rejected.jsonl", "sizes.json", "spans.npy"]
    )
    for name in files[0]:
        assert (tmp_path / "out1" / "train" / name).read_bytes() == (tmp_path / "out3" / "train" / name).read_bytes()
    assert json.loads((tmp_path / "out1" / "train" / "sizes.json").read_text()) == {"0.tar": 4, "1.tar": 4, "2.tar": 2}


def test_index_json_has_counts_sizes_and_the_duration(tmp_path):
    write_clips(tmp_path, ["a.wav", "b.wav"])
    manifest = write_rows(tmp_path / "m.csv", [{"file": n, "caption": n} for n in ("a.wav", "b.wav")])
    pack(options(tmp_path, manifest=manifest))
    split = tmp_path / "out" / "train"
    index = json.loads((split / "index.json").read_text())
    size = (split / "0.tar").stat().st_size
    assert index["version"] == 1 and index["num_pairs"] == 2 and index["duration_s"] > 0
    assert index["shards"] == [{"name": "0.tar", "num_pairs": 2, "size_bytes": size}]


@pytest.mark.parametrize("how", ["killed", "failed"])
def test_a_split_that_was_taken_away_comes_back(tmp_path, monkeypatch, how):
    write_clips(tmp_path, ["a.wav"])
    manifest = write_rows(tmp_path / "m.csv", [{"file": "a.wav", "caption": "old"}])
    pack(options(tmp_path, manifest=manifest))
    before = (tmp_path / "out" / "train" / "0.tar").read_bytes()
    if how == "killed":
        scratch = tmp_path / "out" / scratch_name(2**22 + 1)
        (scratch / "old").mkdir(parents=True)
        (tmp_path / "out" / "train").rename(scratch / "old" / "train")
        with pytest.raises(DataError, match="there already"):
            pack(options(tmp_path, manifest=manifest))
    else:
        original = Path.rename

        def rename(self, target):
            if Path(target) == tmp_path / "out" / "train":
                monkeypatch.undo()
                raise OSError(28, "No space left on device")
            return original(self, target)

        monkeypatch.setattr(Path, "rename", rename)
        with pytest.raises(DataError, match="No space.*nothing that was there is lost"):
            pack(options(tmp_path, manifest=manifest, overwrite=True))
    assert (tmp_path / "out" / "train" / "0.tar").read_bytes() == before
    assert not list((tmp_path / "out").glob(".packing-*"))


@pytest.mark.parametrize("failing", ["close", "move"])
def test_no_name_of_a_split_makes_a_half_made_one_appear(tmp_path, monkeypatch, failing):
    write_clips(tmp_path, ["a.wav", "b.wav", "c.wav"])
    names = {"a.wav": "x", "b.wav": "train.old", "c.wav": "train.ready"}
    manifest = write_rows(tmp_path / "m.csv", [{"file": f, "caption": "x", "split": s} for f, s in names.items()])
    split = {"columns": Columns(split="split")}

    def full(*args):
        raise OSError(28, "No space left on device")

    if failing == "close":
        monkeypatch.setattr(pack_writer, "index_split", full)
    else:
        monkeypatch.setattr("clap_zero.data.pack.take_place", full)
    with pytest.raises(DataError, match="No space"):
        pack(options(tmp_path, manifest=manifest, **split))
    assert list((tmp_path / "out").iterdir()) == []
    monkeypatch.undo()
    report = pack(options(tmp_path, manifest=manifest, **split))
    assert list(report.splits) == sorted(report.splits, key=list(names.values()).index) == list(names.values())
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["train.old", "train.ready", "x"]


def test_a_disk_that_fills_at_the_second_split_leaves_the_first_as_it_was(tmp_path, monkeypatch):
    write_clips(tmp_path, ["a.wav", "b.wav"])
    rows = [{"file": "a.wav", "caption": "x", "split": "one"}, {"file": "b.wav", "caption": "x", "split": "two"}]
    original = pack_writer.index_split

    def full(directory, *args):
        if directory.name == "two":
            raise OSError(28, "No space left on device")
        original(directory, *args)

    monkeypatch.setattr(pack_writer, "index_split", full)
    with pytest.raises(DataError, match="No space"):
        pack(options(tmp_path, manifest=write_rows(tmp_path / "m.csv", rows), columns=Columns(split="split")))
    assert list((tmp_path / "out").iterdir()) == []


def test_two_packs_remove_the_same_leftover(tmp_path, monkeypatch):
    scratch = tmp_path / scratch_name(2**22 + 1)
    (scratch / "old" / "train").mkdir(parents=True)
    original = Path.rename

    def second(self, target):
        original(self, target)
        return original(self, target)  # the other pack was faster

    monkeypatch.setattr(Path, "rename", second)
    remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["train"]


def test_a_full_split_is_not_touched_without_overwrite(tmp_path):
    write_clips(tmp_path, ["a.wav"])
    manifest = write_rows(tmp_path / "m.csv", [{"file": "a.wav", "caption": "old"}])
    pack(options(tmp_path, manifest=manifest))
    write_rows(manifest, [{"file": "a.wav", "caption": "new"}])
    with pytest.raises(DataError, match="--overwrite"):
        pack(options(tmp_path, manifest=manifest))
    assert read_split(tmp_path / "out" / "train")[0][2]["text"] == ["old"]
    pack(options(tmp_path, manifest=manifest, overwrite=True))
    assert read_split(tmp_path / "out" / "train")[0][2]["text"] == ["new"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["train"]


def test_nothing_usable_is_an_error_and_leaves_nothing(tmp_path):
    manifest = write_rows(tmp_path / "m.csv", [{"file": "a.wav", "caption": "x"}])
    with pytest.raises(DataError, match=r"0 usable of 1 samples.*missing"):
        pack(options(tmp_path, manifest=manifest))
    assert list((tmp_path / "out").iterdir()) == []


def test_a_killed_pack_leaves_nothing_half_made_and_the_next_one_cleans_up(tmp_path):
    names = [f"{n}.wav" for n in range(400)]
    for name in names:
        (tmp_path / name).write_bytes(audio_bytes(1, seconds=3, kind="WAV"))
    manifest = write_rows(tmp_path / "m.csv", [{"file": name, "caption": name} for name in names])
    code = (
        "from pathlib import Path; from clap_zero.data.pack import PackOptions, pack; "
        f"pack(PackOptions(out=Path({str(tmp_path / 'out')!r}), manifest=Path({str(manifest)!r}), shard_size=5))"
    )
    env = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    process = subprocess.Popen([sys.executable, "-c", code], env=env, stderr=subprocess.DEVNULL)
    while not list((tmp_path / "out").glob(".packing-*/made/train/2.tar")):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "out" / "train").exists()
    write_rows(manifest, [{"file": name, "caption": name} for name in names[:3]])
    pack(options(tmp_path, manifest=manifest))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["train"]
