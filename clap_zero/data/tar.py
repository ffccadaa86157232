"""Finds the members of a tar by reading its headers only, and goes on behind damage.

tarfile stops without a word at the first broken header in the middle of a file; a shard that lost 4 kB would lose
every sample behind them. Here a broken header is reported and the next readable one is searched. Extended names (PAX
and GNU) are understood. Nothing is ever extracted.
"""

from __future__ import annotations

import os
import tarfile
from dataclasses import dataclass, field
from pathlib import Path

_BLOCK = 512
_ZEROS = bytes(_BLOCK)
_MAGIC, _MAGIC_OFFSET = b"ustar", 257
_SEARCH_BYTES = 1 << 20
_MAX_EXTENDED_BYTES = 1 << 20
_PAX, _PAX_GLOBAL, _GNU_NAME, _GNU_LINK = b"x", b"g", b"L", b"K"


@dataclass(frozen=True)
class Member:
    """A regular file inside a tar: its name, and where its bytes lie in the tar."""

    name: str
    offset: int
    size_bytes: int


@dataclass
class TarScan:
    """All members that can be read whole, in the order of the tar, and what is wrong with the tar, if anything."""

    members: list[Member] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


@dataclass
class _Extended:
    """What extended headers say about the next member."""

    name: str | None = None
    size_bytes: int | None = None

    def read(self, kind: bytes, data: bytes) -> None:
        if kind == _GNU_NAME:
            self.name = data.rstrip(b"\0").decode("utf-8", "surrogateescape")
        elif kind == _PAX:
            records = _pax_records(data)
            if b"path" in records:
                self.name = records[b"path"].decode("utf-8", "surrogateescape")
            if records.get(b"size", b"").isdigit():
                self.size_bytes = int(records[b"size"])


def scan_tar(path: str) -> TarScan:
    """Reads the headers of an uncompressed tar.

    Args:
        path: the tar.

    Returns:
        The members that lie whole in the file, and the tar's faults in words.

    Raises:
        OSError: the file cannot be opened or read.
    """
    scan = TarScan()
    with Path(path).open("rb") as file:
        _scan(file.fileno(), os.fstat(file.fileno()).st_size, scan)
    return scan


def _scan(descriptor: int, end: int, scan: TarScan) -> None:
    offset, extended, trusted, closed = 0, _Extended(), True, False
    while offset + _BLOCK <= end:
        block = os.pread(descriptor, _BLOCK, offset)
        header = None if block == _ZEROS else _parse(block)
        if header is None:
            following = _find_header(descriptor, offset + _BLOCK, end)
            if block == _ZEROS and following is None:
                closed = True
                break
            if following is None:
                scan.faults.append(_unreadable(block, offset))
                return
            scan.faults.append(f"{following - offset} bytes at offset {offset} are damaged")
            # The name of the member behind the damage may have stood in an extended header that is lost.
            offset, extended, trusted = following, _Extended(), False
            continue
        is_member = header.type in tarfile.REGULAR_TYPES
        size_bytes = extended.size_bytes if is_member and extended.size_bytes is not None else header.size
        start = offset + _BLOCK
        if start + size_bytes > end:
            scan.faults.append(f"is cut short inside member {extended.name or header.name!r}")
            return
        if header.type in (_PAX, _GNU_NAME) and size_bytes <= _MAX_EXTENDED_BYTES:
            extended.read(header.type, os.pread(descriptor, size_bytes, start))
            trusted = True
        elif header.type not in (_PAX_GLOBAL, _GNU_LINK):
            if is_member and trusted:
                scan.members.append(Member(extended.name or header.name, start, size_bytes))
            extended, trusted = _Extended(), True
        offset = start + (size_bytes + _BLOCK - 1) // _BLOCK * _BLOCK
    if not closed:
        scan.faults.append("is empty" if end == 0 else "has no end mark: it may be cut short")


def _parse(block: bytes) -> tarfile.TarInfo | None:
    """The header in a block, None unless its checksum is right."""
    try:
        header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return None
    return header if header.size >= 0 else None


def _find_header(descriptor: int, offset: int, end: int) -> int | None:
    """Offset of the first readable header at or behind a block boundary."""
    while offset + _BLOCK <= end:
        chunk = os.pread(descriptor, _SEARCH_BYTES, offset)
        found = chunk.find(_MAGIC)
        while found >= 0:
            start = found - _MAGIC_OFFSET
            if start >= 0 and start % _BLOCK == 0 and _parse(chunk[start : start + _BLOCK]) is not None:
                return offset + start
            found = chunk.find(_MAGIC, found + 1)
        offset += _SEARCH_BYTES
    return None


def _unreadable(block: bytes, offset: int) -> str:
    if offset == 0:
        return "is compressed: only plain tars are read" if block[:2] == b"\x1f\x8b" else "is not a tar"
    return f"cannot be read from offset {offset} on"


def _pax_records(data: bytes) -> dict[bytes, bytes]:
    """Records of a PAX header, each `length key=value\\n`; what does not fit the form ends the reading."""
    records = {}
    while data:
        length, _, _ = data.partition(b" ")
        if not length.isdigit() or not len(length) < int(length) <= len(data):
            break
        key, _, value = data[len(length) + 1 : int(length) - 1].partition(b"=")
        records[key] = value
        data = data[int(length) :]
    return records
