"""Shards that other loaders read wrongly (the ids are those of the list of field faults): from the tar to the batch."""

from __future__ import annotations

import json
import logging
import tarfile
from pathlib import Path

import pytest

from clap_zero import cli
from clap_zero.data.index import load_index
from clap_zero.data.pack import PackOptions, pack
from clap_zero.errors import DataError
from tests.unit.data.reading import keys_of, skipped_of, take
from tests.unit.data.shard_files import audio_bytes, pair, write_split, write_tar


def shard(directory: Path, members: list[tuple[str, bytes]], form: int = tarfile.USTAR_FORMAT) -> Path:
    write_tar(directory / "train" / "0.tar", members, form)
    return directory / "train"


def write_clips(directory: Path, names: list[str]) -> None:
    directory.mkdir()
    for number, name in enumerate(names):
        (directory / name).write_bytes(audio_bytes(number, kind="WAV"))


def manifest(directory: Path, names: list[str]) -> Path:
    path = directory / "m.jsonl"
    path.write_text("\n".join(json.dumps({"file": name, "caption": f"sound {name}"}) for name in names))
    return path


def test_p01_names_that_break_shells_and_urls(tmp_path):
    names = ["a b (1) [x]'.wav", "-r.wav", "$(touch pwned).wav", "naïve 音.wav", "n" * 226 + ".wav"]
    write_clips(tmp_path / "in", names)
    out = tmp_path / "my data"
    pack(PackOptions(out=out, manifest=manifest(tmp_path / "in", names), progress=False))
    spaced = (out / "train" / "0.tar").rename(out / "train" / "shard 0.tar")
    for name in ("sizes.json", "index.json", "spans.npy"):
        (out / "train" / name).unlink(missing_ok=True)
    batches = take(load_index([str(spaced)]), 5)
    keys = keys_of(batches)
    assert len({key.lower() for key in keys}) == 5 and not (tmp_path / "pwned").exists()
    assert all(key[0] not in "-." and set(key) <= set(map(chr, range(33, 127))) - set("./'$()[] ") for key in keys)
    with tarfile.open(spaced) as tar:
        records = [json.loads(tar.extractfile(member).read()) for member in tar if member.name.endswith(".json")]
    assert [record["original_data"]["name"] for record in records] == names


def test_p03_counts_that_are_not_those_on_disk(tmp_path, caplog, capsys):
    names = [f"{n}.wav" for n in range(7)]
    write_clips(tmp_path / "in", [*names, "extra.wav"])
    rows = [*names, "gone1.wav", "gone2.wav", names[0]]
    report = pack(PackOptions(out=tmp_path / "out", manifest=manifest(tmp_path / "in", rows), progress=False))
    text = "\n".join(report.lines())
    assert "10 rows: 7 packed, 2 rejected, 1 said twice" in text and "missing" in text and "extra.wav" in text

    split = write_split(tmp_path / "train", [90])
    (split / "sizes.json").write_text('{"0.tar": 100}')
    with caplog.at_level(logging.WARNING):
        batches = take(split, 10, micro_batch=10)
    assert len(skipped_of(batches)) == 10 and "has 90 pairs" in caplog.text
    assert {batch.position.epoch for batch in batches} == {0} and len(set(keys_of(batches))) == 90
    assert cli.main(["check", str(split), "--workers", "1"]) == 0  # 10 are passed over: fewer than the least limit
    out = capsys.readouterr().out
    assert "90 usable" in out and "10 unusable" in out and "the index says 100" in out


def test_s01_members_that_are_not_side_by_side(tmp_path):
    first, second = pair("a", 1), pair("b", 2)
    split = shard(tmp_path, [first[0], second[0], first[1], second[1]])
    batches = take(split, 2)
    assert sorted(keys_of(batches)) == ["a", "b"]
    for key, seed in (("a", 1), ("b", 2)):
        (alone,) = take(shard(tmp_path / key, pair(key, seed)), 1)
        together = next(batch for batch in batches if batch.keys[0].endswith(f"::{key}"))
        assert (alone.clips.samples == together.clips.samples).all()
        assert (alone.caption_ids == together.caption_ids).all()


def test_s02_a_member_name_twice(tmp_path, caplog):
    """Copies are ignored; of other contents nobody can say which belong together, so the key is skipped and named."""
    first, other, second = pair("a", 1), pair("a", 9), pair("b", 2)
    with caplog.at_level(logging.WARNING):
        batches = take(shard(tmp_path, [first[0], first[1], other[0], *second]), 2)
    assert keys_of(batches) == ["b", "b"]
    assert skipped_of(batches) == {"a": "stands in the tar more than once with other contents: 'a.flac'"}
    assert "0.tar: has 1 doubled members" in caplog.text and "a.flac" in caplog.text
    copied = take(shard(tmp_path / "copied", [*first, first[0], *second]), 2)
    assert sorted(keys_of(copied)) == ["a", "b"] and not skipped_of(copied)


def test_s04_dots_in_names_and_folders(tmp_path):
    members = []
    names = ["235 Track 2.0 (Clean).mp3", "22.05.wav", "train.v1/0001.flac", "x/y/z.flac"]
    for number, name in enumerate(names):
        kind = {"mp3": "MP3", "wav": "WAV", "flac": "FLAC"}[name[name.rfind(".") + 1 :]]
        stem = name[: name.rfind(".")]
        text = (f"{stem}.txt", b"x") if stem == "22.05" else (f"{stem}.json", b'{"text": "x"}')
        members += [(name, audio_bytes(number, kind=kind)), text]
    batches = take(shard(tmp_path, members), 4)
    assert sorted(keys_of(batches)) == ["22.05", "235 Track 2.0 (Clean)", "train.v1/0001", "x/y/z"]
    write_clips(tmp_path / "in", ["22.05.wav"])
    pack(PackOptions(out=tmp_path / "out", manifest=manifest(tmp_path / "in", ["22.05.wav"]), progress=False))
    assert all("." not in key for key in keys_of(take(tmp_path / "out" / "train", 1)))


@pytest.mark.parametrize(
    ("names", "suffixes"),
    [
        (("k{}.input.flac", "k{}.outputs.txt"), (".input.flac (8)", ".outputs.txt (8)")),
        (("k{}.flac", "k{}.cls"), (".flac (8)", ".cls (8)")),
    ],
)
@pytest.mark.parametrize("declare", [False, True])
def test_s06_every_sample_is_filtered_out(tmp_path, capsys, names, suffixes, declare):
    """Said at the start, before there are ranks that could wait for each other."""
    split = shard(tmp_path, [(name.format(n), audio_bytes(n)) for n in range(8) for name in names])
    if declare:
        (split / "sizes.json").write_text('{"0.tar": 8}')
    with pytest.raises(DataError, match="0 usable of") as caught:
        load_index([str(split)])
    assert all(suffix in str(caught.value) for suffix in suffixes)
    assert cli.main(["check", str(split)]) == 3
    assert "0 usable of" in capsys.readouterr().err


def test_s07_a_tar_cut_short_and_one_with_a_hole(tmp_path, caplog, capsys):
    split = write_split(tmp_path / "train", [16] * 8)
    data = (split / "3.tar").read_bytes()
    (split / "3.tar").write_bytes(data[: len(data) * 7 // 10])
    data = bytearray((split / "5.tar").read_bytes())
    middle = slice(len(data) // 2, len(data) // 2 + 4096)
    data[middle] = bytes(byte ^ 0xFF for byte in data[middle])
    (split / "5.tar").write_bytes(data)
    index = load_index([str(split)])
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        ranks = [take(index, 16, rank=rank, world_size=2, micro_batch=4) for rank in range(2)]
    assert [{batch.position.epoch for batch in batches} for batches in ranks] == [{0}, {0}]  # equal steps, to the end
    lost = {key for batches in ranks for batch in batches for key, _ in batch.skipped}
    assert 4 <= len(lost) <= 9
    read = {key for batches in ranks for batch in batches for key in batch.keys}
    assert len(read) == 128 - len(lost) and any("4.tar" in key for key in read)
    for name in ("3.tar", "5.tar"):
        faults = [
            r.getMessage() for r in caplog.records if f"{name}: " in r.getMessage() and "skipped" not in r.message
        ]
        assert 1 <= len(faults) <= 4, faults  # at most what is wrong and what is missing, on each rank
    assert cli.main(["check", str(split), "--workers", "1", "--no-index"]) == 0
    assert f"{len(lost)} unusable" in capsys.readouterr().out


@pytest.mark.parametrize("workers", [0, 1, 4])
def test_s10_the_epoch_is_as_long_with_any_number_of_workers(tmp_path, workers):
    split = write_split(tmp_path / "train", [64])
    batches = take(split, 9, micro_batch=8, workers=workers)
    assert [batch.position.epoch for batch in batches] == [0] * 8 + [1]
    assert sorted(keys_of(batches[:8])) == [f"s{n:04d}" for n in range(64)]


def test_s11_workers_share_the_shards(tmp_path):
    split = write_split(tmp_path / "train", [8] * 8)
    ranks = [take(split, 16, rank=rank, world_size=2, micro_batch=4, workers=2) for rank in range(2)]
    epochs = [[key for batches in ranks for key in keys_of(batches[half : half + 8])] for half in (0, 8)]
    for keys in epochs:
        assert len(keys) == len(set(keys)) == 64
    assert epochs[0] != epochs[1]
    again = take(split, 16, rank=0, world_size=2, micro_batch=4, workers=2)
    assert keys_of(again) == keys_of(ranks[0])
    assert keys_of(take(split, 16, rank=0, world_size=2, micro_batch=4, seed=1)) != keys_of(again)


def test_s14_a_brace_range_past_the_last_shard_or_over_a_gap(tmp_path, capsys):
    directory = tmp_path / "train"
    for number in (0, 1, 2, 4, 5, 6, 7, 8):
        write_tar(directory / f"s-{number:06d}.tar", pair(f"k{number}", number))
    assert cli.main(["check", str(directory / "s-{000000..000009}.tar")]) == 3
    out, error = capsys.readouterr()
    assert "8 usable" in out  # the check itself goes on
    assert "2 of 10 shards are missing" in error and "s-000003.tar" in error and "s-000009.tar" in error
    assert cli.main(["check", str(directory / "s-{0..8}.tar")]) == 3
    assert "padded" in capsys.readouterr().err
    pattern = str(directory / "s-{000000..000009}.tar")
    assert cli.main(["check", pattern, "--missing-shards", "skip", "--workers", "1"]) == 0
    assert "8 usable" in capsys.readouterr().out
    # Unquoted braces become many arguments.
    there = [str(path) for path in sorted(directory.glob("*.tar"))]
    assert len({key for batch in take(load_index(there), 8) for key in batch.keys}) == 8


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT], ids=["pax", "gnu"])
def test_s16_tars_made_on_a_mac(tmp_path, form):
    long = "ü" * 150
    members = [
        ("._a.wav", b"j" * 4096), ("a.wav", audio_bytes(1, kind="WAV")), (".DS_Store", b"j"), ("a.txt", b"x"),
        ("__MACOSX/._b.json", b"j"), (f"{long}.flac", audio_bytes(2)), (f"{long}.txt", b"y"),
    ]  # fmt: skip
    batches = take(shard(tmp_path, members, form), 2)
    assert sorted(keys_of(batches)) == ["a", long] and not skipped_of(batches)
