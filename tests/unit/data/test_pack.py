from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
import soundfile

from clap_zero.audio.clips import FeatureConfig
from clap_zero.data.index import load_index
from clap_zero.data.loader import LoaderPlan, train_batches
from clap_zero.data.pack import PackOptions, pack
from clap_zero.data.pack_scratch import scratch_name
from clap_zero.data.pack_sources import Columns
from clap_zero.errors import ConfigError, DataError
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


@pytest.mark.parametrize("kind", ["m.csv", "m.jsonl"])
def test_manifest_to_laion_layout(tmp_path, kind):
    write_clips(tmp_path / "in", ["a.wav", "b.wav", "c.wav"])
    rows = [
        {"file": "a.wav", "caption": "one", "caption_2": "uno", "split": "train", "tag": "x", "licence": "CC0"},
        {"file": "b.wav", "caption": "two, with comma", "caption_2": "", "split": "train", "tag": "", "licence": ""},
        {"file": "c.wav", "caption": "three", "caption_2": "", "split": "test", "tag": "", "licence": ""},
    ]
    report = pack(options(tmp_path, manifest=write_rows(tmp_path / "in" / kind, rows), columns=Columns(split="split")))
    assert {name: split.num_pairs for name, split in report.splits.items()} == {"train": 2, "test": 1}
    a, b = read_split(tmp_path / "out" / "train")
    assert a[0] == "a" and a[2]["text"] == ["one", "uno"] and a[2]["tag"] == ["x"]
    assert a[2]["original_data"] == {"licence": "CC0", "name": "a.wav"}
    assert b[2]["text"] == ["two, with comma"]
    info = soundfile.info(io.BytesIO(a[1]))
    assert (info.samplerate, info.channels, info.format, info.subtype) == (48_000, 1, "FLAC", "PCM_16")
    # 16-bit sound at 48 kHz comes through unchanged.
    before, _ = soundfile.read(tmp_path / "in" / "a.wav", dtype="int16")
    after, _ = soundfile.read(io.BytesIO(a[1]), dtype="int16")
    np.testing.assert_array_equal(before, after)
    assert load_index([str(tmp_path / "out" / "train")]).num_samples == 2


def test_columns_can_be_named_and_captions_repeated(tmp_path):
    write_clips(tmp_path, ["a.wav", "b.wav"])
    rows = [
        {"sound": "a.wav", "x": "one", "y": ["two", "three"]},
        {"sound": "a.wav", "x": "four", "y": []},
        {"sound": "a.wav", "x": "one", "y": []},
        {"sound": "b.wav", "x": "five", "y": ["five"]},
    ]
    manifest = write_rows(tmp_path / "m.jsonl", rows)
    report = pack(options(tmp_path, manifest=manifest, columns=Columns(audio="sound", captions=("x", "y"))))
    assert [record["text"] for _, _, record in read_split(tmp_path / "out" / "train")] == [
        ["one", "two", "three", "four"],
        ["five"],
    ]
    assert (report.num_rows, report.num_pairs, report.num_duplicates) == (4, 2, 1)


def test_a_missing_column_is_named_with_those_there(tmp_path):
    manifest = write_rows(tmp_path / "m.csv", [{"file": "a.wav", "category": "dog"}])
    with pytest.raises(DataError, match=r"no column 'sound'; it has \['file', 'category'\]"):
        pack(options(tmp_path, manifest=manifest, columns=Columns(audio="sound")))
    with pytest.raises(DataError, match="--caption-template"):
        pack(options(tmp_path, manifest=manifest))


def test_strange_names_are_packed_under_safe_unique_keys(tmp_path):
    names = [
        "a b (1) [x]'.wav",
        "-r.wav",
        "$(touch pwned).wav",
        "naïve 音.wav",
        "n" * 230 + ".wav",
        "音.wav",
        "x/1.0.wav",
    ]
    names += ["y/1.0.wav", "y/1_0.wav"]
    write_clips(tmp_path / "in", names)
    rows = [{"file": name, "caption": "c"} for name in names]
    out = tmp_path / "my data"
    report = pack(options(tmp_path, manifest=write_rows(tmp_path / "in" / "m.csv", rows), out=out))
    assert report.num_pairs == len(names)
    pairs = read_split(out / "train")
    keys = [key for key, _, _ in pairs]
    assert len({key.lower() for key in keys}) == len(names)
    assert all(key[0] not in "-." and set(key) <= set(map(chr, range(33, 127))) - set("./'$()[] ") for key in keys)
    assert [record["original_data"]["name"] for _, _, record in pairs] == names
    assert not (tmp_path / "pwned").exists() and not Path("pwned").exists()
    plan = LoaderPlan(rank=0, world_size=1, micro_batch=9, features=FeatureConfig("rand_trunc"))
    assert len(set(next(train_batches(load_index([str(out / "train")]), plan=plan)).keys)) == len(names)


def test_differences_between_manifest_and_disk_are_counted_and_printed(tmp_path):
    names = [f"{n}.wav" for n in range(10)]
    write_clips(tmp_path / "in", [*names[:7], "extra.wav"])
    rows = [{"file": name, "caption": name} for name in [*names[:7], "gone1.wav", "gone2.wav", names[0]]]
    report = pack(options(tmp_path, manifest=write_rows(tmp_path / "in" / "m.csv", rows)))
    assert (report.num_rows, report.num_pairs, report.num_rejected, report.num_duplicates) == (10, 7, 2, 1)
    assert [Path(path).name for path in report.extra] == ["extra.wav"]
    text = "\n".join(report.lines())
    assert "10 rows: 7 packed, 2 rejected, 1 said twice" in text and "missing" in text and "extra.wav" in text
    assert [entry["file"] for entry in rejected(tmp_path / "out" / "train")] == ["gone1.wav", "gone2.wav"]


def test_files_without_sound_are_rejected_with_reasons(tmp_path):
    names = [f"{n}.wav" for n in range(30)]
    write_clips(tmp_path / "in", names)
    (tmp_path / "in" / "a.wav").write_bytes(b"")
    (tmp_path / "in" / "b.mp3").write_bytes(b"ID3\x03\x00\x00\x00\x0c\x1a\x4a" + bytes(200_000))
    rows = [{"file": name, "caption": "c"} for name in [*names[:10], "a.wav", "b.mp3", *names[10:]]]
    report = pack(options(tmp_path, manifest=write_rows(tmp_path / "in" / "m.csv", rows)))
    assert (report.num_pairs, report.num_rejected) == (30, 2)
    found = {entry["file"]: entry["reason"] for entry in rejected(tmp_path / "out" / "train")}
    assert "0 bytes" in found["a.wav"] and "ID3" in found["b.mp3"]


def test_rows_without_captions_are_rejected(tmp_path):
    write_clips(tmp_path, [f"{n}.wav" for n in range(6)])
    values = ["ok", "", "  ", None, [], 5]
    rows = [{"file": f"{n}.wav", "caption": value} for n, value in enumerate(values)]
    rows.append({"file": "", "caption": "x"})
    report = pack(options(tmp_path, manifest=write_rows(tmp_path / "m.jsonl", rows)))
    assert (report.num_pairs, report.num_rejected) == (1, 6)
    assert sum(report.reasons.values()) == 6


def test_an_unquoted_comma_is_told(tmp_path):
    write_clips(tmp_path, ["a.wav", "b.wav"])
    (tmp_path / "m.csv").write_text("file,caption\na.wav,a dog\nb.wav,a dog, barking\n")
    report = pack(options(tmp_path, manifest=tmp_path / "m.csv"))
    assert report.num_pairs == 1 and "more cells than the header" in rejected(tmp_path / "out" / "train")[0]["reason"]


def test_a_file_in_two_splits_stays_in_the_first(tmp_path):
    write_clips(tmp_path, ["a.wav"])
    rows = [{"file": "a.wav", "caption": "x", "split": split} for split in ("train", "test")]
    report = pack(options(tmp_path, manifest=write_rows(tmp_path / "m.csv", rows), columns=Columns(split="split")))
    assert list(report.splits) == ["train"] and report.num_rejected == 1
    assert "in split 'train' already" in rejected(tmp_path / "out" / "train")[0]["reason"]


@pytest.mark.parametrize("split", ["../evil", "a/b", "", ".hidden"])
def test_a_split_cannot_leave_the_directory(tmp_path, split):
    write_clips(tmp_path, ["a.wav", "b.wav"])
    rows = [{"file": "a.wav", "caption": "x", "split": split}, {"file": "b.wav", "caption": "x", "split": "test"}]
    report = pack(options(tmp_path, manifest=write_rows(tmp_path / "m.csv", rows), columns=Columns(split="split")))
    assert report.num_pairs == 1 and "cannot be the name of a split" in next(iter(report.reasons))


def test_folder_with_sidecars(tmp_path):
    write_clips(tmp_path / "in", ["a.wav", "deep/er/b.1.wav", "none.wav", "bad.wav", "._a.wav"])
    (tmp_path / "in" / "a.txt").write_text("a dog\n")
    (tmp_path / "in" / "deep" / "er" / "b.1.json").write_text(json.dumps({"text": ["x", "y"], "tag": ["t"], "id": 7}))
    (tmp_path / "in" / "bad.json").write_text("{")
    (tmp_path / "in" / "orphan.txt").write_text("no audio")
    report = pack(options(tmp_path, folder=tmp_path / "in"))
    pairs = {record["original_data"]["name"]: record for _, _, record in read_split(tmp_path / "out" / "train")}
    assert pairs["a.wav"]["text"] == ["a dog"] and pairs["deep/er/b.1.wav"]["text"] == ["x", "y"]
    assert pairs["deep/er/b.1.wav"]["original_data"]["id"] == 7
    assert {entry["file"]: entry["reason"] for entry in rejected(tmp_path / "out" / "train")} == {
        "none.wav": "no .json or .txt beside it",
        "bad.wav": "broken json",
    }
    assert [Path(path).name for path in report.extra] == ["orphan.txt"]


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
        scratch.mkdir()
        (tmp_path / "out" / "train").rename(scratch / "train.old")
        with pytest.raises(DataError, match="there already"):
            pack(options(tmp_path, manifest=manifest))
    else:
        original = Path.rename

        def rename(self, target):
            if Path(target).name == "train":
                monkeypatch.undo()
                raise OSError(28, "No space left on device")
            return original(self, target)

        monkeypatch.setattr(Path, "rename", rename)
        with pytest.raises(DataError, match="No space.*nothing that was there is lost"):
            pack(options(tmp_path, manifest=manifest, overwrite=True))
    assert (tmp_path / "out" / "train" / "0.tar").read_bytes() == before
    assert not list((tmp_path / "out").glob(".packing-*"))


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
    while not list((tmp_path / "out").glob(".packing-*/train/2.tar")):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "out" / "train").exists()
    write_rows(manifest, [{"file": name, "caption": name} for name in names[:3]])
    pack(options(tmp_path, manifest=manifest))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["train"]


def test_long_and_silent_clips_are_counted(tmp_path):
    write_clips(tmp_path, ["short.wav"])
    (tmp_path / "long.wav").write_bytes(audio_bytes(1, seconds=2, rate_hz=8000, kind="WAV"))
    soundfile.write(tmp_path / "silent.wav", np.zeros(4800, np.float32), 48_000)
    rows = [{"file": f"{name}.wav", "caption": name} for name in ("short", "long", "silent")]
    manifest = write_rows(tmp_path / "m.csv", rows)
    report = pack(options(tmp_path, manifest=manifest, max_seconds=1.0))
    assert (report.num_cut, report.num_silent, report.num_pairs) == (1, 1, 3)
    lengths = [soundfile.info(io.BytesIO(flac)).frames for _, flac, _ in read_split(tmp_path / "out" / "train")]
    assert lengths == [2400, 48_000, 4800]
    dropped = pack(options(tmp_path, manifest=manifest, drop_silent=True, overwrite=True))
    assert dropped.num_pairs == 2 and dropped.reasons["silent"] == 1


def test_exactly_one_source(tmp_path):
    with pytest.raises(ConfigError, match="one of a manifest"):
        pack(options(tmp_path))
    with pytest.raises(ConfigError, match="one of a manifest"):
        pack(options(tmp_path, folder=tmp_path, dataset="x"))


@pytest.mark.parametrize("text", ['{"a": 1}\n{"b"', "[1]", "not json"])
def test_a_broken_manifest_names_the_line(tmp_path, text):
    (tmp_path / "m.jsonl").write_text(text)
    with pytest.raises(DataError, match=r"m\.jsonl:\d"):
        pack(options(tmp_path, manifest=tmp_path / "m.jsonl"))
