"""Packing what people have on their disks: names of every kind, and files that are none (P01, P03, A01, A09, S04)."""

from __future__ import annotations

import json
import os
import socket
import wave
from pathlib import Path

import pytest

from clap_zero.data.index import load_index
from clap_zero.data.pack import PackOptions, PackReport, pack
from clap_zero.data.pack_files import plain, read_file, readable
from clap_zero.errors import DataError, one_line
from tests.unit.data.packing import options, read_split, rejected, write_clips, write_rows
from tests.unit.data.shard_files import audio_bytes


def pack_folder(tmp_path: Path, **change) -> PackReport:
    return pack(options(tmp_path, folder=tmp_path / "in", **change))


def write_pair(path: Path, seed: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(audio_bytes(seed, kind="WAV"))
    path.with_suffix(".txt").write_text(f"caption {seed}")


def reasons(tmp_path: Path) -> dict[str, str]:
    return {entry["file"]: entry["reason"] for entry in rejected(tmp_path / "out" / "train")}


def test_names_that_no_tool_likes(tmp_path):
    names = [
        "two\nlines.wav", "tab\t.wav", "-r.wav", "--out.wav", "'quo\"te`.wav", "$(touch x);&|.wav", "back\\slash.wav",
        "%s {} *?.wav",
        "con.wav", "NUL.wav", "com1.wav", "Twin.wav", "twin.wav", "TWIN.WAV", "twin-2.wav", "a.b.c.wav", ".hidden.wav",
        "é.wav", "e\u0301.wav", "音.wav", "\u202egnp.wav", "x" * 251 + ".wav", " .wav", "~.wav",
        "235 Track 2.0 (Clean).wav",
    ]  # fmt: skip
    for number, name in enumerate(names):
        path = tmp_path / "in" / f"{number}" / name  # apart, for file systems that fold names
        write_pair(path, number)
        assert path.exists()
    report = pack_folder(tmp_path)
    assert (report.num_pairs, report.num_rejected) == (len(names), 0)
    pairs = read_split(tmp_path / "out" / "train")
    keys = [key for key, _, _ in pairs]
    assert len({key.lower() for key in keys}) == len(names)
    safe = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")
    assert all(set(key) <= safe and key[0] != "-" and len(key) < 90 for key in keys)
    assert not {"con", "nul", "com1"} & {key.lower() for key in keys}
    assert {record["original_data"]["name"].partition("/")[2] for _, _, record in pairs} == set(names)
    for _, _, record in pairs:
        number = record["original_data"]["name"].partition("/")[0]
        assert record["text"] == [f"caption {number}"]
    assert all(line.isprintable() for line in report.lines())
    assert load_index([str(tmp_path / "out" / "train")]).num_samples == len(names)


def test_names_that_are_no_utf8(tmp_path):
    directory = os.fsencode(tmp_path / "in")
    Path(os.fsdecode(directory)).mkdir()
    for name, data in [(b"na\xefve.wav", audio_bytes(1, kind="WAV")), (b"bad\xff.wav", b"junk")]:
        with open(os.path.join(directory, name), "wb") as file:  # noqa: PTH118, PTH123  (names of bytes)
            file.write(data)
        with open(os.path.join(directory, name[:-4] + b".txt"), "wb") as file:  # noqa: PTH118, PTH123
            file.write(b"a caption")
    report = pack_folder(tmp_path)
    [(key, _, record)] = read_split(tmp_path / "out" / "train")
    assert record["original_data"]["name"] == r"na\xefve.wav" and key == "na_xefve" and record["text"] == ["a caption"]
    assert list(reasons(tmp_path)) == [r"bad\xff.wav"]
    "\n".join(report.lines()).encode("utf-8")


def test_what_has_the_name_of_a_recording_and_is_none(tmp_path):
    folder = tmp_path / "in"
    write_pair(folder / "good.wav", 1)
    write_pair(folder / "album.wav" / "inside.wav", 2)
    os.mkfifo(folder / "pipe.wav")
    (folder / "broken.wav").symlink_to(folder / "nothing")
    (folder / "self.wav").symlink_to(folder / "self.wav")
    (folder / "zero.wav").symlink_to("/dev/zero")
    (folder / "memory.wav").symlink_to("/proc/self/mem")  # a regular file that cannot be read
    (folder / "linked.wav").symlink_to(folder / "good.wav")
    (folder / "empty.wav").touch()
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(os.path.relpath(folder / "socket.wav"))  # (the length of a full path is limited)
        names = ("pipe", "broken", "self", "zero", "memory", "linked", "empty", "socket")
        for name in names:
            (folder / f"{name}.txt").write_text("c")
        os.mkfifo(folder / "listen.txt")
        (folder / "listen.wav").write_bytes(audio_bytes(3, kind="WAV"))
        report = pack_folder(tmp_path)
    names_packed = [record["original_data"]["name"] for _, _, record in read_split(tmp_path / "out" / "train")]
    assert names_packed == ["good.wav", "linked.wav", "album.wav/inside.wav"]
    found = reasons(tmp_path)
    assert report.num_listed == report.num_pairs + report.num_rejected == 3 + len(found)
    expected = {
        "pipe": "not a file but a named pipe",
        "broken": "the file is missing",
        "self": "levels of symbolic links",
        "zero": "not a file but a device",
        "memory": "cannot be read",
        "empty": "0 bytes",
        "socket": "cannot be read",
        "listen": "its .txt: not a file but a named pipe",
    }
    assert set(found) == {f"{name}.wav" for name in expected}
    for name, reason in expected.items():
        assert reason in found[f"{name}.wav"], name


def test_a_manifest_that_names_what_is_no_file(tmp_path):
    write_clips(tmp_path, ["a.wav"])
    os.mkfifo(tmp_path / "pipe.wav")
    names = [
        "a.wav",
        "pipe.wav",
        "/dev/zero",
        "/dev/stdin",
        str(tmp_path),
        "a.wav/b.wav",
        "https://x.org/a.wav",
        "a\0.wav",
        "\ud800.wav",
    ]
    manifest = write_rows(tmp_path / "m.jsonl", [{"file": name, "caption": "c"} for name in names])
    report = pack(options(tmp_path, manifest=manifest))
    assert (report.num_pairs, report.num_rejected) == (1, len(names) - 1)
    text = "\n".join(reasons(tmp_path).values())
    for reason in ("named pipe", "a device", "a directory", "is missing", "a URL", "cannot be read"):
        assert reason in text


def test_loops_and_second_ways_into_a_folder(tmp_path):
    write_pair(tmp_path / "in" / "a" / "1.wav", 1)
    write_pair(tmp_path / "elsewhere" / "2.wav", 2)
    (tmp_path / "in" / "a" / "up").symlink_to(tmp_path / "in")
    (tmp_path / "in" / "b").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "in" / "c").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "in" / "gone").symlink_to(tmp_path / "nowhere")
    pack_folder(tmp_path)
    names = [record["original_data"]["name"] for _, _, record in read_split(tmp_path / "out" / "train")]
    assert names == ["a/1.wav", "b/2.wav"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_folder_and_a_file_that_may_not_be_read(tmp_path):
    for name in ("a.wav", "b.wav", "shut/c.wav"):
        write_pair(tmp_path / "in" / name)
    (tmp_path / "in" / "b.wav").chmod(0)
    (tmp_path / "in" / "shut").chmod(0)
    try:
        pack_folder(tmp_path)
    finally:
        (tmp_path / "in" / "shut").chmod(0o755)
    found = reasons(tmp_path)
    assert "Permission denied" in found["b.wav"] and "the folder cannot be read" in found["shut/"]


def test_a_folder_without_audio_is_an_error(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("x")
    with pytest.raises(DataError, match="holds no audio files"):
        pack_folder(tmp_path)


def test_a_rate_of_one_hertz_costs_nothing(tmp_path):
    write_pair(tmp_path / "in" / "a.wav")
    with wave.open(str(tmp_path / "in" / "slow.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(1)
        file.writeframes(bytes(1_440_000))
    (tmp_path / "in" / "slow.txt").write_text("200 hours")
    pack_folder(tmp_path)
    assert "sampling rate of 1 Hz" in reasons(tmp_path)["slow.wav"]


def test_captions_beside_recordings_in_every_state(tmp_path):
    texts = {
        "bom.txt": b"\xef\xbb\xbfa dog\r\n", "latin.txt": b"caf\xe9", "empty.txt": b" \n", "zeros.txt": b"\0\0",
        "deep.json": b'{"text": "x", "y": ' + b"[" * 5000 + b"]" * 5000 + b"}", "list.json": b"[1]",
        "deepish.json": b'{"text": "x", "y": ' + b"[" * 900 + b"]" * 900 + b"}",
        "nan.json": b'{"text": "x", "y": NaN, "z": {"w": [Infinity, "\\ud800"]}}', "null.json": b'{"text": null}',
    }  # fmt: skip
    for name, data in texts.items():
        write_pair(tmp_path / "in" / f"{name.partition('.')[0]}.wav")
        (tmp_path / "in" / f"{name.partition('.')[0]}.txt").unlink()
        (tmp_path / "in" / name).write_bytes(data)
    report = pack_folder(tmp_path)
    pairs = {key: record for key, _, record in read_split(tmp_path / "out" / "train")}
    assert pairs["bom"]["text"] == ["a dog"] and "latin" in pairs
    assert pairs["nan"]["original_data"]["y"] is None
    assert pairs["nan"]["original_data"]["z"] == {"w": [None, "\\ud800"]}
    assert {"empty.wav", "deep.wav", "list.wav", "null.wav"} <= set(reasons(tmp_path))
    assert report.num_pairs + report.num_rejected == len(texts)


MANIFESTS = {
    "a mark, and Windows line ends": b"\xef\xbb\xbffile,caption\r\na.wav,one\r\nb.wav,two\r\n",
    "old line ends": b"file,caption\ra.wav,one\rb.wav,two\r",
    "quoted line breaks and commas": b'file,caption\na.wav,"one\n"\n"b.wav","two"\n',
    "semicolons": b"file;caption\na.wav;one\nb.wav;two\n",
    "tabs": b"file\tcaption\na.wav\tone\nb.wav\ttwo",
    "spaces in the header, blank lines": b"file , caption\n\na.wav,one\n\n\nb.wav,two\n\n",
    "columns without a name": b",file,caption,\n0,a.wav,one,\n1,b.wav,two,\n",
}


@pytest.mark.parametrize("kind", MANIFESTS)
def test_tables_of_every_kind(tmp_path, kind):
    write_clips(tmp_path, ["a.wav", "b.wav"])
    (tmp_path / "m.csv").write_bytes(MANIFESTS[kind])
    pack(options(tmp_path, manifest=tmp_path / "m.csv"))
    assert [record["text"] for _, _, record in read_split(tmp_path / "out" / "train")] == [["one"], ["two"]]


BROKEN = {
    "two columns of one name": (b"file,caption,caption\na.wav,one,two\n", "two columns 'caption'"),
    "a quote that is never closed": (b'file,caption\na.wav,"one\nb.wav,two\n', r"m.csv:3 is not a valid CSV"),
    "another encoding": (b"file,caption\na.wav,one\nb.wav,caf\xe9\n", "m.csv:3 is not UTF-8"),
    "UTF-16": ("file,caption\na.wav,one\n".encode("utf-16"), "not UTF-8"),
    "nothing": (b"", "has no rows"),
    "a header alone": (b"file,caption\n", "has no rows"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_tables_that_are_refused(tmp_path, kind):
    data, message = BROKEN[kind]
    write_clips(tmp_path, ["a.wav", "b.wav"])
    (tmp_path / "m.csv").write_bytes(data)
    with pytest.raises(DataError, match=message):
        pack(options(tmp_path, manifest=tmp_path / "m.csv"))


def test_rows_and_clips_add_up(tmp_path):
    write_clips(tmp_path, ["a.wav", "b.wav", "c.wav"])
    rows = [("a.wav", "1"), ("a.wav", "2"), ("a.wav", "1"), ("b.wav", "1"), ("gone.wav", "1"), ("c.wav", "")]
    report = pack(
        options(tmp_path, manifest=write_rows(tmp_path / "m.csv", [{"file": f, "caption": c} for f, c in rows]))
    )
    assert "6 rows: 2 packed, 2 rejected, 1 said twice, 1 with more captions of a clip" in report.lines()


def test_a_table_that_is_a_pipe_or_missing_is_refused(tmp_path):
    os.mkfifo(tmp_path / "m.csv")
    with pytest.raises(DataError, match=r"m.csv: not a file but a named pipe"):
        pack(options(tmp_path, manifest=tmp_path / "m.csv"))
    with pytest.raises(DataError, match=r"n.csv: the file is missing"):
        pack(options(tmp_path, manifest=tmp_path / "n.csv"))


def test_files_are_read_within_a_limit(tmp_path):
    (tmp_path / "a").write_bytes(bytes(1000))
    assert read_file(str(tmp_path / "a"), max_bytes=1000) == bytes(1000)
    with pytest.raises(DataError, match="larger than 999 bytes"):
        read_file(str(tmp_path / "a"), max_bytes=999)
    assert read_file("/proc/self/status", max_bytes=100_000).startswith(b"Name:")  # announces 0 bytes


def test_text_for_messages_and_json():
    assert readable("a\udcff") == r"a\xff" and readable("音") == "音" and readable("\ud800") == r"\ud800"
    assert one_line("a\nb\x1b[31m") == r"a\nb\x1b[31m"
    value = plain({1: float("nan"), "b": (1, "x\udc80", b"y"), "c": True})
    assert json.loads(json.dumps(value, allow_nan=False)) == {"1": None, "b": [1, "x\\udc80", "b'y'"], "c": True}


def test_options_are_kept_in_one_place():
    """A new option has to be either deciding for parts, or known not to be."""
    apart = {"out", "manifest", "folder", "dataset", "audio_root", "part", "workers", "overwrite", "progress"}
    decided = set(PackOptions(out=Path(), folder=Path()).deciding())
    assert set(PackOptions.__dataclass_fields__) - apart == decided - {"kind"}
