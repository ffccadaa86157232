"""The byte range of each sample, `spans.npy` beside sizes.json: reading a sample without the shard's other headers.

A plain .npy file of SPAN_TYPE, one row a sample: the shards in the natural order of sizes.json, in each the samples as
`ShardReader` numbers them. A range starts at the first header of the sample's members and ends behind the last of them,
so it is a small tar itself: its headers prove that it is the right place. Length 0: the members do not stand side by
side, so the whole shard has to be looked at. Rows are read one by one, as they are needed: a file of a hundred million
rows costs no memory.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from clap_zero.data.members import Group, ShardContents
from clap_zero.data.preads import pread_all

SPANS_FILE = "spans.npy"
SPAN_TYPE = np.dtype([("offset", "<u8"), ("length", "<u4")])
_ROW = struct.Struct("<QI")
_MAX_HEADER_BYTES = 10_000
_MAX_LENGTH = 2**32 - 1


@dataclass(frozen=True)
class SpansRef:
    """Where the byte ranges of a shard's samples stand.

    Attributes:
        path: local path or URL of the split's spans.npy.
        first_row: row of the shard's first sample.
        num_rows: rows that the file must have: the sum of the split's sizes.json. Another number means that one of the
            two was written without the other, and that rows belong to other shards than it seems.
    """

    path: str
    first_row: int
    num_rows: int


class SpansError(Exception):
    """A spans.npy that cannot be used; the message is the reason."""


def group_span(group: Group) -> tuple[int, int]:
    """(offset, length in bytes) of a complete pair's members with their headers; (0, 0) where others lie between."""
    assert group.audio is not None
    members = sorted([group.audio, *group.texts.values()], key=lambda member: member.header_offset)
    if group.fault or any(before.end != after.header_offset for before, after in pairwise(members)):
        return 0, 0
    length = members[-1].end - members[0].header_offset
    return (members[0].header_offset, length) if length <= _MAX_LENGTH else (0, 0)


def contents_rows(contents: ShardContents) -> np.ndarray:
    """Rows of a shard's complete pairs, SPAN_TYPE (num_complete,)."""
    return np.array([group_span(group) for group in contents.groups[: contents.num_complete]], dtype=SPAN_TYPE)


def save_spans(path: Path, rows: np.ndarray) -> None:
    """Writes rows as spans.npy: complete, or not at all."""
    assert rows.dtype == SPAN_TYPE and rows.ndim == 1
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with part.open("wb") as file:
            np.save(file, rows, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def read_header(descriptor: int) -> tuple[int, int]:
    """(offset of the first row, number of rows) of an open spans.npy.

    Raises:
        SpansError: it is no such file, or shorter than it says.
        OSError: it cannot be read.
    """
    size_bytes = os.fstat(descriptor).st_size
    head = pread_all(descriptor, min(_MAX_HEADER_BYTES, size_bytes), 0)
    if head[:6] != b"\x93NUMPY" or len(head) < 12:
        raise SpansError("is no .npy file")
    wide = head[6] > 1
    length = struct.unpack("<I" if wide else "<H", head[8 : 12 if wide else 10])[0]
    start = (12 if wide else 10) + length
    fields = head[12 if wide else 10 : start].decode("latin-1")
    rows = _shape(fields)
    if start > len(head) or rows is None or "<u8" not in fields or "<u4" not in fields:
        raise SpansError(f"is no table of {SPAN_TYPE.descr}")
    if size_bytes < start + rows * _ROW.size:
        raise SpansError("is cut short")
    return start, rows


def _shape(fields: str) -> int | None:
    """Rows of an array header that describes exactly SPAN_TYPE; None for any other."""
    expected = f"{{'descr': {SPAN_TYPE.descr!r}, 'fortran_order': False, 'shape': ("
    text = fields.strip()
    digits = text.removeprefix(expected).split(",")[0]
    known = text.startswith(expected) and digits.isdigit() and len(digits) < 16
    return int(digits) if known else None


def read_row(descriptor: int, start: int, row: int) -> tuple[int, int]:
    """(offset, length) of a row of an open spans.npy whose rows begin at `start`."""
    data = pread_all(descriptor, _ROW.size, start + row * _ROW.size)
    return _ROW.unpack(data) if len(data) == _ROW.size else (0, 0)


class SpanTables:
    """Rows of the spans.npy files that are in use. May be called from several threads.

    Args:
        open_file: opens a spans.npy, local or remote, and returns its descriptor.
    """

    def __init__(self, open_file: Callable[[str], int]) -> None:
        self._open_file = open_file
        self._lock = threading.Lock()
        self._tables: dict[str, tuple[int, int, int] | SpansError] = {}

    def row(self, spans: SpansRef, sample_id: int) -> tuple[int, int]:
        """(offset, length) of a sample.

        Raises:
            SpansError: the file cannot be used.
        """
        with self._lock:  # over the read, too: `close` may be called meanwhile, and a descriptor be another file then
            if spans.path not in self._tables:
                self._tables[spans.path] = self._load(spans.path)
            table = self._tables[spans.path]
            if isinstance(table, SpansError):
                raise table
            descriptor, start, num_rows = table
            if num_rows != spans.num_rows:
                raise SpansError(f"has {num_rows} rows, sizes.json counts {spans.num_rows} samples")
            row = spans.first_row + sample_id
            if not 0 <= row < num_rows:
                raise SpansError(f"has {num_rows} rows, row {row} is needed")
            return read_row(descriptor, start, row)

    def _load(self, path: str) -> tuple[int, int, int] | SpansError:
        try:
            descriptor = self._open_file(path)
        except (OSError, SpansError) as error:
            return SpansError(str(error))
        try:
            return (descriptor, *read_header(descriptor))
        except (OSError, SpansError) as error:
            os.close(descriptor)
            return SpansError(str(error))

    def close(self) -> None:
        """Closes all files."""
        with self._lock:
            for table in self._tables.values():
                if not isinstance(table, SpansError):
                    os.close(table[0])
            self._tables.clear()
