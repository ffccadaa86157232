from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
import soundfile

from clap_zero.audio.clips import FeatureConfig
from clap_zero.data.index import load_index
from clap_zero.data.loader import LoaderPlan, train_batches
from clap_zero.data.pack import pack
from clap_zero.data.pack_sources import Columns
from clap_zero.errors import ConfigError, DataError
from tests.unit.data.packing import options, read_split, rejected, write_clips, write_rows
from tests.unit.data.shard_files import audio_bytes


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
