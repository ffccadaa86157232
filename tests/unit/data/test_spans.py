"""Byte ranges of samples: what spans.npy says, and what happens when it is wrong."""

from __future__ import annotations

import os
import pickle
import tarfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from clap_zero.data.index import load_index
from clap_zero.data.members import BadSampleError
from clap_zero.data.shards import Shard, ShardReader
from clap_zero.data.spans import (
    SPAN_TYPE,
    SPANS_FILE,
    SpansError,
    SpansRef,
    SpanTables,
    read_header,
    read_row,
    save_spans,
)
from clap_zero.data.tar import scan_bytes
from tests.unit.data.shard_files import pair, write_split, write_tar
from tests.unit.data.span_files import span_rows, write_spans


def with_spans(path: Path, num: int, first_row: int = 0, num_rows: int | None = None) -> Shard:
    total = num if num_rows is None else num_rows
    return Shard(str(path), "", num, 0, SpansRef(str(path.parent / SPANS_FILE), first_row, total))


def read_all(shard: Shard) -> tuple[list, list[str]]:
    reader = ShardReader()
    found = [reader.read(shard, n) for n in range(shard.num_samples)]
    reader.close()
    return found, reader.take_notes()


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_a_range_is_a_small_tar_with_exactly_its_sample(tmp_path, form):
    long = "d" * 60 + "/" + "n" * 60
    keys = ["a", long, "x/y z"] + ([] if form == tarfile.USTAR_FORMAT else ["音" * 120])
    members = [member for number, key in enumerate(keys) for member in pair(key, number)]
    path = write_tar(tmp_path / "0.tar", members, form)
    rows, data = span_rows(str(path)), path.read_bytes()
    for key, row in zip(keys, rows, strict=True):
        part = scan_bytes(data[row["offset"] : row["offset"] + row["length"]])
        assert [member.name for member in part.members] == [f"{key}.flac", f"{key}.json"] and part.faults == []


def test_reading_by_range_equals_reading_by_headers(tmp_path):
    split = write_split(tmp_path / "train", [3, 12, 1])
    write_spans(split)
    first = 0
    for name, size in (("0.tar", 3), ("1.tar", 12), ("2.tar", 1)):
        shard = with_spans(split / name, size, first, 16)
        assert read_all(shard) == read_all(Shard(shard.path, "", size))
        assert read_all(shard)[1] == []
        first += size


def test_no_other_header_is_read(tmp_path, monkeypatch):
    split = write_split(tmp_path / "train", [200], seconds=0.001)
    write_spans(split)
    reader, total, original = ShardReader(), [0, 0], os.pread

    def pread(descriptor, size, offset):
        data = original(descriptor, size, offset)
        total[0], total[1] = total[0] + 1, total[1] + len(data)
        return data

    monkeypatch.setattr(os, "pread", pread)
    raw = reader.read(with_spans(split / "0.tar", 200), 150)
    assert raw.key == "s0150" and reader.suffixes() == {}
    assert total[0] <= 3 and total[1] < 20_000  # the header of the table, its row, the sample
    reader.close()


def test_natural_order_of_the_shards(tmp_path):
    split = write_split(tmp_path / "train", [1] * 12)
    rows = np.load(write_spans(split), allow_pickle=False)
    assert rows.dtype == SPAN_TYPE and rows.shape == (12,)
    index = load_index([str(split)])
    for number in range(12):
        assert index.shard(number).spans == SpansRef(str(split / SPANS_FILE), number, len(rows))
        assert read_all(index.shard(number))[0][0].key == f"s{number:04d}"


def test_members_that_lie_apart_have_no_range_and_are_read_all_the_same(tmp_path):
    a, b = pair("a", 1), pair("b", 2)
    path = write_tar(tmp_path / "0.tar", [a[0], b[0], a[1], b[1], *pair("c", 3)])
    rows = span_rows(str(path))
    assert rows["length"].tolist()[:2] == [0, 0] and rows["length"][2] > 0
    save_spans(tmp_path / SPANS_FILE, rows)
    found, notes = read_all(with_spans(path, 3))
    assert [raw.key for raw in found] == ["a", "b", "c"] and notes == []
    assert [raw.audio for raw in found] == [a[0][1], b[0][1], pair("c", 3)[0][1]]


def test_of_copies_the_first_is_in_the_range(tmp_path):
    first = pair("a", 1)
    path = write_tar(tmp_path / "0.tar", [*first, first[0], *pair("b", 2)])
    save_spans(tmp_path / SPANS_FILE, span_rows(str(path)))
    found, _ = read_all(with_spans(path, 2))
    assert found[0].audio == first[0][1] and found[1].key == "b"


@pytest.mark.parametrize("shift", [1, -512, 512, 10**6, 2**63])
def test_a_range_at_the_wrong_place_costs_a_note_and_no_sample(tmp_path, shift):
    split = write_split(tmp_path / "train", [5])
    rows = np.load(write_spans(split))
    rows["offset"] = (rows["offset"].astype(object) + shift) % 2**64
    save_spans(split / SPANS_FILE, rows)
    found, notes = read_all(with_spans(split / "0.tar", 5))
    assert [raw.key for raw in found] == [f"s{n:04d}" for n in range(5)]
    assert len(notes) == 1 and "spans.npy cannot be used" in notes[0]


def test_a_range_over_two_samples_is_refused(tmp_path):
    split = write_split(tmp_path / "train", [4])
    rows = np.load(write_spans(split))
    rows["length"][1] += rows["length"][2]
    save_spans(split / SPANS_FILE, rows)
    found, notes = read_all(with_spans(split / "0.tar", 4))
    assert [raw.key for raw in found] == [f"s{n:04d}" for n in range(4)] and len(notes) == 1


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"junk" * 100,
        b"\x93NUMPY\x01\0\xff\xff",
        b"\x93NUMPY\2\0\xff\xff\xff\xff" + b" " * 50,
        "objects",
        "cut",
        "other",
    ],
)
def test_a_file_that_is_no_table_of_ranges(tmp_path, content):
    split = write_split(tmp_path / "train", [5])
    path = write_spans(split)
    if content == "objects":  # unpickling would run code
        np.save(path, np.array([print, print]), allow_pickle=True)
    elif content == "cut":
        path.write_bytes(path.read_bytes()[:-8])
    elif content == "other":
        np.save(path, np.zeros(5, dtype=[("length", "<u4"), ("offset", "<u8")]))
    else:
        path.write_bytes(content)
    with path.open("rb") as file, pytest.raises(SpansError):
        read_header(file.fileno())
    found, notes = read_all(with_spans(split / "0.tar", 5))
    assert [raw.key for raw in found] == [f"s{n:04d}" for n in range(5)] and len(notes) == 1


def test_a_table_that_is_gone_or_too_short(tmp_path):
    split = write_split(tmp_path / "train", [5])
    assert len(read_all(with_spans(split / "0.tar", 5))[1]) == 1
    write_spans(split)
    assert len(read_all(with_spans(split / "0.tar", 5, first_row=3))[1]) == 1


def test_absurd_lengths_cost_no_memory(tmp_path):
    split = write_split(tmp_path / "train", [2])
    rows = np.load(write_spans(split))
    rows["length"] = 2**32 - 1
    save_spans(split / SPANS_FILE, rows)
    assert [raw.key for raw in read_all(with_spans(split / "0.tar", 2))[0]] == ["s0000", "s0001"]


@pytest.mark.parametrize("pattern", ["{split}", "{split}/{{0..1}}.tar"])
def test_a_sizes_file_that_was_edited_moves_no_shard(tmp_path, pattern):
    """The rows of later shards begin where the counts of those in front end: another count would shift them all."""
    split = write_split(tmp_path / "train", [3, 3])
    write_spans(split)
    (split / "sizes.json").write_text('{"0.tar": 2, "1.tar": 3}')
    index = load_index([pattern.format(split=split)])
    found, notes = read_all(index.shard(1))
    assert [raw.key for raw in found] == ["s0003", "s0004", "s0005"]
    assert len(notes) == 1 and "has 6 rows, sizes.json counts 5 samples" in notes[0]


def test_a_table_may_be_closed_while_others_read(tmp_path, monkeypatch):
    """A descriptor that was closed may be another file by the time of the read."""
    split = write_split(tmp_path / "train", [2])
    write_spans(split)
    tables = SpanTables(lambda path: os.open(path, os.O_RDONLY))
    reading, closed = threading.Event(), threading.Event()

    def slow_row(descriptor, start, row):
        reading.set()
        closed.wait(0.2)
        assert os.fstat(descriptor).st_size > 0
        return read_row(descriptor, start, row)

    monkeypatch.setattr("clap_zero.data.spans.read_row", slow_row)
    with ThreadPoolExecutor(1) as threads:
        row = threads.submit(tables.row, with_spans(split / "0.tar", 2).spans, 1)
        assert reading.wait(10)
        tables.close()
        closed.set()
        assert row.result()[1] > 0


def test_keys_are_known_after_reading_and_before(tmp_path):
    split = write_split(tmp_path / "train", [3])
    write_spans(split)
    reader, shard = ShardReader(), with_spans(split / "0.tar", 3)
    assert reader.key(shard, 1) == "#1"
    reader.read(shard, 1)
    assert reader.key(shard, 1) == "s0001" and reader.key(shard, 2) == "#2"
    assert reader.contents(shard).keys == ["s0000", "s0001", "s0002"] and reader.key(shard, 2) == "s0002"


def test_a_reader_may_be_sent_to_a_worker(tmp_path):
    split = write_split(tmp_path / "train", [2])
    reader = pickle.loads(pickle.dumps(ShardReader(shards_kept=3)))
    assert reader.read(Shard(str(split / "0.tar"), "", 2), 1).key == "s0001"
    with pytest.raises(BadSampleError, match="the index says 3 samples, the shard has 2"):
        reader.read(Shard(str(split / "0.tar"), "", 3), 2)
    reader.close()
