"""Finds the members of a tar by reading its headers only, and goes on behind damage.

tarfile stops without a word at the first broken header in the middle of a file; a shard that lost 4 kB would lose
every sample behind them. Here a broken header is reported and the next readable one is searched. Extended names (PAX
and GNU) are understood. Nothing is ever extracted, names never touch the file system, and whatever a tar claims, time
and memory are bounded: MAX_MEMBERS members, MAX_NAME_BYTES of a name, one SEARCH_LIMIT_BYTES of damage.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, field

from clap_zero.data.preads import Window

_BLOCK = 512
_ZEROS = bytes(_BLOCK)
_MAGIC, _MAGIC_OFFSET = b"ustar", 257
_SEARCH_BYTES = 1 << 20
_MAX_EXTENDED_BYTES = 1 << 20
_MAX_FAULTS = 20
_MAX_DIGITS = 19
_PAX, _PAX_GLOBAL, _GNU_NAME, _GNU_LINK = b"x", b"g", b"L", b"K"
_EXTENDED_TYPES = (_PAX, _PAX_GLOBAL, _GNU_NAME, _GNU_LINK)
_COMPRESSED = {
    b"\x1f\x8b": "gunzip", b"\x28\xb5\x2f\xfd": "unzstd", b"BZh": "bunzip2", b"\xfd7zXZ": "unxz",
    b"\x04\x22\x4d\x18": "unlz4",
}  # fmt: skip
MAX_MEMBERS = 262_144
MAX_NAME_BYTES = 4_096
MAX_NAMES_BYTES = 64 << 20
SEARCH_LIMIT_BYTES = 1 << 30

ReadAt = Callable[[int, int], bytes]
"""(offset, number of bytes) -> bytes, fewer at the end."""


@dataclass(frozen=True, slots=True)
class Member:
    """A regular file inside a tar.

    Attributes:
        name: as the tar has it.
        offset: where its bytes lie in the tar.
        size_bytes: how many they are.
        header_offset: where its first header lies, extended ones included.
    """

    name: str
    offset: int
    size_bytes: int
    header_offset: int = 0

    @property
    def end(self) -> int:
        """Where the next header lies."""
        return self.offset + _padded(self.size_bytes)


@dataclass
class TarScan:
    """All members that can be read whole, in the order of the tar, and what is wrong with the tar, if anything."""

    members: list[Member] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Header:
    """Name, type and size of what follows a header."""

    name: str
    type: bytes
    size: int


@dataclass
class _Extended:
    """What extended headers say about the next member, and where the first of them lies."""

    start: int
    name: str | None = None
    size_bytes: int | None = None
    sparse: bool = False

    def read(self, kind: bytes, data: bytes) -> bool:
        """Takes over what a header says; False where it is damaged."""
        if kind == _GNU_NAME:
            self.name = data.rstrip(b"\0").decode("utf-8", "surrogateescape")
            return bool(self.name) and "\0" not in self.name
        records, whole = _pax_records(data)
        if b"path" in records:
            self.name = records[b"path"].decode("utf-8", "surrogateescape")
        size = records.get(b"size", b"")
        if size.isdigit() and len(size) <= _MAX_DIGITS:
            self.size_bytes = int(size)
        self.sparse |= any(name.startswith(b"GNU.sparse.") for name in records)
        return whole


def scan_descriptor(descriptor: int) -> TarScan:
    """Reads the headers of an uncompressed tar.

    Args:
        descriptor: the open tar.

    Returns:
        The members that lie whole in the file, and the tar's faults in words.

    Raises:
        OSError: the file cannot be read.
    """
    end = os.fstat(descriptor).st_size
    scan = _Scan(Window(descriptor, end).read, end)
    scan.walk()
    return scan.result


def scan_bytes(data: bytes) -> TarScan:
    """As scan_descriptor, of a piece of a tar: that it lacks the end mark is no fault."""
    scan = _Scan(lambda offset, size: data[offset : offset + size], len(data))
    scan.walk(whole=False)
    return scan.result


class _Scan:
    """One walk over the headers of a tar.

    Args:
        read: reads from it.
        end: its size in bytes.
    """

    def __init__(self, read: ReadAt, end: int) -> None:
        self._read, self._end = read, end
        self._search_left = SEARCH_LIMIT_BYTES
        self._names_bytes = 0
        self._num_faults = 0
        self.result = TarScan()

    def walk(self, *, whole: bool = True) -> None:
        offset, extended, trusted, closed = 0, _Extended(0), True, False
        while offset + _BLOCK <= self._end:
            block = self._read(offset, _BLOCK)
            header = None if block == _ZEROS else _parse(block)
            start, fault = offset + _BLOCK, ""
            if header is not None:
                size_bytes = _data_bytes(header, extended)
                if start + size_bytes > self._end:
                    fault = (
                        f"is cut short inside a member of {size_bytes} bytes: {_short(extended.name or header.name)}"
                    )
                    header = None
            if header is None:
                following = self._find_header(start)
                if block == _ZEROS and following is None:
                    closed = True
                    break
                if following is None:
                    self._fault(fault or _unreadable(block, offset))
                    break
                # The name of the member behind damage may have stood in an extended header that is lost. Behind a size
                # that cannot be, nothing is lost: the first header of the next member is the one that was found.
                trusted = bool(fault)
                if self._is_empty(offset, following):
                    fault = f"goes on behind its end, as tars do that were joined: from offset {following} on"
                    trusted = self._has_whole_name(following)
                self._fault(fault or f"{following - offset} bytes at offset {offset} are damaged")
                offset, extended = following, _Extended(following)
                continue
            after = start + _padded(size_bytes)
            if header.type in (_PAX, _GNU_NAME):
                fits = size_bytes <= _MAX_EXTENDED_BYTES
                trusted = fits and extended.read(header.type, self._read(start, size_bytes))
                if not trusted:
                    self._fault(f"has a damaged name at offset {start}: the member is not used")
            elif header.type not in _EXTENDED_TYPES:
                if header.type in tarfile.REGULAR_TYPES and trusted:
                    self._add(header, extended, Member(extended.name or header.name, start, size_bytes, extended.start))
                extended, trusted = _Extended(after), True
                if len(self.result.members) >= MAX_MEMBERS or self._names_bytes > MAX_NAMES_BYTES:
                    self._fault(f"has more than {len(self.result.members)} members: the rest is not read")
                    return
            offset = after
        if whole and not closed and not self._num_faults:
            self._fault("is empty" if self._end == 0 else "has no end mark: it may be cut short")

    def _is_empty(self, start: int, end: int) -> bool:
        """Whether only zeros stand there, and not very many."""
        return end - start <= _SEARCH_BYTES and not any(self._read(start, end - start))

    def _has_whole_name(self, offset: int) -> bool:
        """Whether no program would have put the name of this header into an extended one in front of it."""
        header = _parse(self._read(offset, _BLOCK))
        return header is not None and header.name.isascii() and "?" not in header.name and len(header.name) < 99

    def _add(self, header: _Header, extended: _Extended, member: Member) -> None:
        num_bytes = len(member.name.encode("utf-8", "surrogateescape"))
        if num_bytes > MAX_NAME_BYTES:
            self._fault(f"has a member whose name has {num_bytes} bytes: it is not used")
        elif extended.sparse or header.type == tarfile.GNUTYPE_SPARSE:
            self._fault(f"stores a member as a sparse file, which is not used: {_short(member.name)}")
        else:
            self._names_bytes += num_bytes
            self.result.members.append(member)

    def _fault(self, fault: str) -> None:
        self._num_faults += 1
        if self._num_faults <= _MAX_FAULTS:
            self.result.faults.append(fault)
        elif self._num_faults == _MAX_FAULTS + 1:
            self.result.faults.append("has more faults than are listed")

    def _find_header(self, offset: int) -> int | None:
        """Offset of the first readable header at or behind a block boundary."""
        while offset + _BLOCK <= self._end and self._search_left > 0:
            chunk = self._read(offset, _SEARCH_BYTES)
            self._search_left -= len(chunk)
            found = chunk.find(_MAGIC)
            while found >= 0:
                start = found - _MAGIC_OFFSET
                if start >= 0 and start % _BLOCK == 0 and _parse(chunk[start : start + _BLOCK]) is not None:
                    return offset + start
                found = chunk.find(_MAGIC, found + 1)
            offset += _SEARCH_BYTES
        return None


def _padded(size_bytes: int) -> int:
    return (size_bytes + _BLOCK - 1) // _BLOCK * _BLOCK


def _data_bytes(header: _Header, extended: _Extended) -> int:
    """Bytes behind a header. As in tarfile, links and directories have none, whatever their size field says."""
    if header.type in tarfile.REGULAR_TYPES:
        return header.size if extended.size_bytes is None else extended.size_bytes
    return header.size if header.type in _EXTENDED_TYPES or header.type not in tarfile.SUPPORTED_TYPES else 0


def _parse(block: bytes) -> _Header | None:
    """The header in a block, None unless its checksum is right."""
    if block[_MAGIC_OFFSET : _MAGIC_OFFSET + 5] == _MAGIC and block[156:157] == tarfile.REGTYPE:
        header = _parse_file(block)
        if header is not None:
            return header
    try:
        slow = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return None
    return _Header(slow.name, slow.type, slow.size) if slow.size >= 0 else None


def _parse_file(block: bytes) -> _Header | None:
    """The usual case, several times faster than tarfile: a file with octal numbers; None where it is not that."""
    try:
        size, checksum = int(block[124:136].rstrip(b" \0"), 8), int(block[148:156].strip(b" \0"), 8)
    except ValueError:
        return None
    if size < 0 or checksum != sum(block) - sum(block[148:156]) + 256:
        return None
    name, prefix = block[:100].partition(b"\0")[0], block[345:500].partition(b"\0")[0]
    path = prefix + b"/" + name if prefix else name
    return _Header(path.decode("utf-8", "surrogateescape"), tarfile.REGTYPE, size)


def _short(name: str) -> str:
    return repr(name if len(name) <= 200 else f"{name[:200]}...")


def _unreadable(block: bytes, offset: int) -> str:
    if offset > 0:
        return f"cannot be read from offset {offset} on"
    for magic, program in _COMPRESSED.items():
        if block.startswith(magic):
            return f"is compressed: only plain tars are read, unpack it with {program} and name the .tar"
    return "is not a tar"


def _pax_records(data: bytes) -> tuple[dict[bytes, bytes], bool]:
    """Records of a PAX header, each `length key=value\\n`, and whether all of it fits this form."""
    records: dict[bytes, bytes] = {}
    start = 0
    while start < len(data):
        digits = data[start : start + _MAX_DIGITS + 1].partition(b" ")[0]
        if not digits.isdigit() or not len(digits) < int(digits) <= len(data) - start:
            return records, False
        key, _, value = data[start + len(digits) + 1 : start + int(digits) - 1].partition(b"=")
        records[key] = value
        start += int(digits)
    return records, True
