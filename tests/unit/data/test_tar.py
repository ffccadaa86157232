from __future__ import annotations

import gzip
import tarfile
from pathlib import Path

import pytest

from clap_zero.data.shards import scan_shard
from clap_zero.data.tar import scan_tar
from tests.unit.data.shard_files import audio_bytes, pair, write_tar


def names(path: Path) -> list[str]:
    return [member.name for member in scan_tar(str(path)).members]


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_agrees_with_tarfile(tmp_path, form):
    long = "d" * 60 + "/" + "n" * 60 + ".flac"
    members = [("a.flac", b"1" * 700), ("x/y z.json", b"{}"), (long, b"3" * 512), ("empty.txt", b"")]
    if form != tarfile.USTAR_FORMAT:
        members.append(("音" * 50 + "x" * 150 + ".flac", b"4" * 10))
    path = write_tar(tmp_path / "0.tar", members, form)
    scan = scan_tar(str(path))
    assert scan.faults == []
    with tarfile.open(path) as tar:
        assert [(m.name, m.offset, m.size_bytes) for m in scan.members] == [
            (m.name, m.offset_data, m.size) for m in tar.getmembers()
        ]


def test_links_and_directories_are_no_members(tmp_path):
    path = tmp_path / "0.tar"
    with tarfile.open(path, "w") as tar:
        for name, kind in (("d", tarfile.DIRTYPE), ("l.flac", tarfile.SYMTYPE), ("h.flac", tarfile.LNKTYPE)):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "/etc/passwd"
            tar.addfile(info)
    assert names(path) == []


def test_truncated_tar_gives_what_lies_whole(tmp_path):
    path = write_tar(tmp_path / "0.tar", [(f"{n}.flac", b"x" * 5000) for n in range(10)])
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * 0.7)])
    scan = scan_tar(str(path))
    assert 0 < len(scan.members) < 10
    assert all(member.offset + member.size_bytes <= path.stat().st_size for member in scan.members)
    assert len(scan.faults) == 1 and "cut short" in scan.faults[0]


def test_damage_in_the_middle_loses_only_what_it_hits(tmp_path):
    path = write_tar(tmp_path / "0.tar", [(f"{n}.flac", b"x" * 600) for n in range(30)])
    data = bytearray(path.read_bytes())
    data[20_000:24_096] = bytes(byte ^ 0x5A for byte in data[20_000:24_096])
    path.write_bytes(data)
    scan = scan_tar(str(path))
    found = [member.name for member in scan.members]
    assert "0.flac" in found and "29.flac" in found
    assert 24 <= len(found) < 30
    assert len(scan.faults) == 1 and "damaged" in scan.faults[0]


def test_zeroed_blocks_in_the_middle_are_not_taken_for_the_end(tmp_path):
    path = write_tar(tmp_path / "0.tar", [(f"{n}.flac", b"x" * 600) for n in range(30)])
    data = bytearray(path.read_bytes())
    data[1536 * 10 : 1536 * 12] = bytes(3072)
    path.write_bytes(data)
    assert "29.flac" in names(path)


def test_a_name_behind_damage_is_not_trusted(tmp_path):
    """Its real name may have stood in a lost header; a short name in its place could make a wrong pair."""
    long = [("p" * 120 + f"{n}.flac", b"x" * 100) for n in range(4)]
    path = write_tar(tmp_path / "0.tar", long, tarfile.GNU_FORMAT)
    data = bytearray(path.read_bytes())
    data[:1024] = b"\x11" * 1024  # the extended name of the first
    path.write_bytes(data)
    assert names(path) == [name for name, _ in long[1:]]


@pytest.mark.parametrize(
    ("data", "words"),
    [(b"", "is empty"), (b"junk" * 1000, "is not a tar"), (gzip.compress(b"x" * 9000) + b"\0" * 600, "compressed")],
)
def test_what_is_no_tar_is_said(tmp_path, data, words):
    path = tmp_path / "0.tar"
    path.write_bytes(data)
    scan = scan_tar(str(path))
    assert scan.members == [] and words in scan.faults[0]


def test_members_that_are_not_side_by_side_are_regrouped(tmp_path):
    first, second = pair("a", 1), pair("b", 2)
    contents = scan_shard(str(write_tar(tmp_path / "0.tar", [first[0], second[0], first[1], second[1]])))
    assert contents.keys == ["a", "b"] and contents.num_complete == 2 and contents.faults == []


def test_of_doubled_members_the_first_is_used_and_it_is_said(tmp_path):
    first, other, b = pair("a", 1), pair("a", 9), pair("b", 2)
    path = write_tar(tmp_path / "0.tar", [first[0], first[1], other[0], *b])
    contents = scan_shard(str(path))
    assert contents.keys == ["a", "b"] and contents.num_complete == 2
    audio = contents.groups[0].audio
    assert path.read_bytes()[audio.offset : audio.offset + audio.size_bytes] == first[0][1]
    assert "doubled" in contents.faults[0] and "a.flac" in contents.faults[0]


def test_dots_in_names(tmp_path):
    members = [
        ("235 Track 2.0 (Clean).mp3", b"1"), ("235 Track 2.0 (Clean).json", b"{}"),
        ("22.05.WAV", b"1"), ("22.05.txt", b"x"),
        ("train.v1/0001.flac", b"1"), ("train.v1/0001.json", b"{}"),
        ("./x/y/z.flac", b"1"), ("x/y/z.json", b"{}"),
    ]  # fmt: skip
    contents = scan_shard(str(write_tar(tmp_path / "0.tar", members)))
    assert contents.keys == ["235 Track 2.0 (Clean)", "22.05", "train.v1/0001", "x/y/z"]
    assert contents.num_complete == 4


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_junk_of_a_mac_is_ignored_and_long_names_read(tmp_path, form):
    long = "ü" * 150
    members = [
        ("._a.wav", b"j" * 4096), ("a.wav", audio_bytes(1, kind="WAV")), (".DS_Store", b"j"), ("a.txt", b"x"),
        ("__MACOSX/._b.json", b"j"), (f"{long}.flac", audio_bytes(2)), (f"{long}.txt", b"y"),
    ]  # fmt: skip
    contents = scan_shard(str(write_tar(tmp_path / "0.tar", members, form)))
    assert contents.keys == ["a", long] and contents.num_complete == 2 and contents.num_ignored == 3


def test_complete_pairs_come_first(tmp_path):
    members = [("half.flac", b"1"), *pair("a", 1), ("text only.json", b"{}"), *pair("b", 2)]
    contents = scan_shard(str(write_tar(tmp_path / "0.tar", members)))
    assert contents.keys == ["a", "b", "half", "text only"] and contents.num_complete == 2
