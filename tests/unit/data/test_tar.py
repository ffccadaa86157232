from __future__ import annotations

import gzip
import tarfile
from pathlib import Path

import pytest

from clap_zero.data.members import BadSampleError, scan_shard
from clap_zero.data.shards import Shard, ShardReader
from clap_zero.data.tar import TarScan, _parse, scan_descriptor
from tests.unit.data.shard_files import audio_bytes, pair, write_tar
from tests.unit.data.span_files import span_rows


def scan_tar(path: str) -> TarScan:
    with Path(path).open("rb") as file:
        return scan_descriptor(file.fileno())


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
    [
        (b"", "is empty"),
        (b"junk" * 1000, "is not a tar"),
        (gzip.compress(b"x" * 9000) + b"\0" * 600, "is compressed: only plain tars are read, unpack it with gunzip"),
        (b"\x28\xb5\x2f\xfd" + b"\0" * 600, "unpack it with unzstd"),
        (b"BZh9" + b"\0" * 600, "unpack it with bunzip2"),
    ],
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


def test_copies_of_a_member_are_ignored_and_said(tmp_path):
    a, b = pair("a", 1), pair("b", 2)
    path = write_tar(tmp_path / "0.tar", [*a, a[0], *b, a[1]])
    contents = scan_shard(str(path))
    assert contents.keys == ["a", "b"] and contents.num_complete == 2 and not contents.groups[0].fault
    assert "2 doubled members" in contents.faults[0] and "a.flac" in contents.faults[0]
    assert span_rows(str(path))["offset"].tolist() == [0, contents.groups[1].audio.header_offset]


@pytest.mark.parametrize("torn", [False, True])
def test_a_key_whose_members_are_there_twice_with_other_contents_is_refused(tmp_path, torn):
    """A writer that was killed behind the first sound and wrote the key anew: sound and caption are of two lives."""
    first, other, b = pair("a", 1), pair("a", 9, text=["other"]), pair("b", 2)
    path = write_tar(tmp_path / "0.tar", [first[0], *([] if torn else first[1:]), *other, *b])
    contents = scan_shard(str(path))
    assert contents.keys == ["a", "b"] and contents.num_complete == 2
    shard, reader = Shard(str(path), "train/0.tar", 2), ShardReader()
    with pytest.raises(BadSampleError, match=r"stands in the tar more than once with other contents: 'a\.\w+'"):
        reader.read(shard, 0)
    assert reader.read(shard, 1).key == "b"
    assert span_rows(str(path))["length"].astype(bool).tolist() == [False, True]
    reader.close()


@pytest.mark.parametrize("name", ["./a.json", "a.JSON"])
def test_two_names_of_one_member_beside_each_other_are_refused_too(tmp_path, name):
    path = write_tar(tmp_path / "0.tar", [*pair("a", 1), (name, b'{"text": "another"}'), *pair("b", 2)])
    contents = scan_shard(str(path))
    assert "more than once with other contents" in contents.groups[0].fault and contents.groups[1].fault == ""


def test_a_second_sound_in_another_format_is_ignored_beside_the_first_only(tmp_path):
    a, b = pair("a", 1), pair("b", 2)
    beside = scan_shard(str(write_tar(tmp_path / "0.tar", [a[0], ("a.wav", b"x"), a[1], *b])))
    assert beside.groups[0].audio.name == "a.flac" and not beside.groups[0].fault
    apart = scan_shard(str(write_tar(tmp_path / "1.tar", [a[0], *b, ("a.wav", b"x"), a[1]])))
    assert apart.groups[0].fault


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


def header(name: str, *, size: int = 0, kind: bytes = tarfile.REGTYPE) -> bytes:
    """A header with a right checksum, whatever it claims."""
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    return info.tobuf(tarfile.GNU_FORMAT)


def padded(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % 512)


def tar_of(tmp_path, *pieces: bytes) -> Path:
    path = tmp_path / "0.tar"
    path.write_bytes(b"".join(pieces) + b"\0" * 1024)
    return path


@pytest.mark.parametrize("size", [10**6, 2**40, 2**63, 2**70])
def test_absurd_sizes_cost_the_member_and_no_memory(tmp_path, size):
    good = [header("b.flac", size=5), padded(b"12345"), header("b.txt", size=1), padded(b"x")]
    path = tar_of(tmp_path, header("a.flac", size=size), *good)
    scan = scan_tar(str(path))
    assert [member.name for member in scan.members] == ["b.flac", "b.txt"]
    assert scan.faults == [f"is cut short inside a member of {size} bytes: 'a.flac'"]


def test_absurd_sizes_in_extended_headers(tmp_path):
    for digits in (b"9" * 18, b"9" * 5_000, b"-5", b"1e9"):
        record = b" size=" + digits + b"\n"
        length = len(record) + len(str(len(record) + 4))
        data = str(length).encode() + record
        pax = [header("pax", size=len(data), kind=b"x"), padded(data)]
        path = tar_of(tmp_path, *pax, header("a.flac", size=3), padded(b"abc"), header("b.flac", size=1), padded(b"x"))
        assert "b.flac" in names(path)


def test_the_number_of_members_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr("clap_zero.data.tar.MAX_MEMBERS", 100)
    path = tar_of(tmp_path, *[header(f"{n}.flac") for n in range(150)])
    scan = scan_tar(str(path))
    assert len(scan.members) == 100 and scan.faults == ["has more than 100 members: the rest is not read"]


def test_names_are_bounded_one_by_one_and_together(tmp_path, monkeypatch):
    def named(name: bytes) -> list[bytes]:
        return [header("@", size=len(name), kind=b"L"), padded(name), header("short", size=1), padded(b"x")]

    path = tar_of(tmp_path, *named(b"n" * 5_000), *named(b"a.flac\0"), *named(b"n" * (2 << 20)), *named(b"b.flac"))
    scan = scan_tar(str(path))
    assert [member.name for member in scan.members] == ["a.flac", "b.flac"]
    assert len(scan.faults) == 2 and "5000 bytes" in scan.faults[0]
    monkeypatch.setattr("clap_zero.data.tar.MAX_NAMES_BYTES", 10_000)
    path = tar_of(tmp_path, *[piece for n in range(50) for piece in named(b"%d" % n * 500)])
    assert 10 < len(names(path)) < 30


def test_damage_everywhere_is_said_in_few_words(tmp_path):
    pieces = [piece for n in range(500) for piece in (b"\xff" * 512, header(f"{n}.txt"), header(f"x{n}.txt"))]
    scan = scan_tar(str(tar_of(tmp_path, *pieces)))
    assert len(scan.members) == 500  # the first behind damage is not trusted
    assert len(scan.faults) == 21 and scan.faults[-1] == "has more faults than are listed"


def test_the_search_behind_damage_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr("clap_zero.data.tar.SEARCH_LIMIT_BYTES", 1 << 20)
    path = tmp_path / "0.tar"
    with path.open("wb") as file:
        file.write(header("a.flac"))
        file.seek(1 << 40)  # a sparse file of a terabyte
        file.write(header("b.flac"))
    assert names(path) == ["a.flac"]


@pytest.mark.parametrize("name", ["../../etc/cron.d/a", "/etc/passwd", "a\nb", "..", "\udcff"])
def test_names_of_members_never_touch_the_file_system(tmp_path, name):
    pieces = []
    for suffix, data in ((".flac", audio_bytes(1)), (".txt", b"words")):
        raw = name.encode("utf-8", "surrogateescape") + suffix.encode()
        pieces += [header("@", size=len(raw), kind=b"L"), padded(raw), header("s", size=len(data)), padded(data)]
    path = tar_of(tmp_path, *pieces)
    reader = ShardReader()
    raw = reader.read(Shard(str(path), "", 1), 0)
    reader.close()
    assert raw.texts == {".txt": b"words"} and raw.key == "/".join(part for part in name.split("/") if part)
    assert list(tmp_path.iterdir()) == [path]


def test_sparse_members_are_not_used(tmp_path):
    """Their bytes lie in the tar without the holes."""
    pax = b"22 GNU.sparse.major=1\n"
    path = tar_of(
        tmp_path,
        header("a.flac", size=512, kind=tarfile.GNUTYPE_SPARSE), b"s" * 512,
        header("pax", size=len(pax), kind=b"x"), padded(pax), header("b.flac", size=3), padded(b"abc"),
        header("c.flac", size=3), padded(b"abc"),
    )  # fmt: skip
    scan = scan_tar(str(path))
    assert [member.name for member in scan.members] == ["c.flac"] and len(scan.faults) == 2


def test_links_with_a_size_have_no_bytes(tmp_path):
    """As in tarfile: old programs write the size of what is linked to."""
    path = tar_of(
        tmp_path,
        header("l.flac", size=5_000, kind=tarfile.LNKTYPE), header("d", size=700, kind=tarfile.DIRTYPE),
        header("a.flac", size=3), padded(b"abc"),
    )  # fmt: skip
    assert names(path) == ["a.flac"]
    with tarfile.open(path) as tar:
        assert [member.name for member in tar.getmembers()] == ["l.flac", "d", "a.flac"]


def test_a_damaged_extended_name_is_not_used(tmp_path):
    path = write_tar(tmp_path / "0.tar", [("é" * 90 + ".flac", b"1"), ("b.flac", b"2")], tarfile.PAX_FORMAT)
    data = bytearray(path.read_bytes())
    data[512] = ord("x")  # the length of the first record
    path.write_bytes(data)
    scan = scan_tar(str(path))
    assert [member.name for member in scan.members] == ["b.flac"] and "damaged name" in scan.faults[0]


def test_a_path_with_spaces_and_other_letters(tmp_path):
    path = write_tar(tmp_path / "my data (1)" / "naïve 音 [x]'.tar", pair("a", 1))
    assert scan_shard(str(path)).keys == ["a"]


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_every_flipped_bit_of_a_header_is_seen_as_tarfile_sees_it(tmp_path, form):
    """The fast way of parsing takes no header that tarfile refuses, and reads the same from it."""
    block = tarfile.TarInfo("a" * 60 + "/" + "b" * 60).tobuf(form)[-512:]
    for bit in range(512 * 8):
        flipped = bytearray(block)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            expected = tarfile.TarInfo.frombuf(bytes(flipped), "utf-8", "surrogateescape")
        except tarfile.HeaderError:
            assert _parse(bytes(flipped)) is None, bit
        else:
            found = _parse(bytes(flipped))
            assert found is not None and (found.name, found.size) == (expected.name, expected.size), bit
    assert _parse(block) is not None


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_all_members_of_tars_that_were_joined_are_there(tmp_path, form):
    long = "d" * 150 + "/naïve"
    members = [pair("a", 1), pair("b", 2), pair("c" if form == tarfile.USTAR_FORMAT else long, 3)]
    parts = [write_tar(tmp_path / f"{n}.tar", some, form).read_bytes() for n, some in enumerate(members)]
    (tmp_path / "all.tar").write_bytes(b"".join(parts))
    contents = scan_shard(str(tmp_path / "all.tar"))
    assert contents.keys == [some[0][0].removesuffix(".flac") for some in members] and contents.num_complete == 3
    assert len(contents.faults) == 2 and all(fault.startswith("goes on behind its end") for fault in contents.faults)


def test_zeros_may_hide_the_true_name_of_what_follows(tmp_path):
    stub = header("x" * 99, size=0)
    scan = scan_tar(str(tar_of(tmp_path, header("a.flac"), bytes(1024), stub, header("b.flac"))))
    assert [member.name for member in scan.members] == ["a.flac", "b.flac"]
