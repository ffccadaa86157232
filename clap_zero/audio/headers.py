"""Headers that announce other than there is: of writers that were killed or wrote into a pipe, and of files cut short.

libsndfile reads no further than a header says, so a recording of a minute could be one of a second, in silence; and of
a file that was cut it says nothing. RF64 and BW64, whose long sizes no file needs that fits into memory, become plain
RIFF: of some it finds no samples.

Sources: "Multimedia Programming Interface and Data Specifications 1.0" (RIFF), EBU Tech 3306 (RF64), ITU-R BS.2088
(BW64), "Audio Interchange File Format" 1.3, Apple's "Core Audio Format Specification" 1.0, RFC 9639 (FLAC), RFC 3533
(Ogg).
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from clap_zero.audio.kinds import TAGS, skip_id3


class _Layout(NamedTuple):
    """Where the chunks of a file begin, the name and size before each, and the name of the one with the samples."""

    first: int
    chunk: struct.Struct
    samples: bytes


_LITTLE, _BIG, _LONG = struct.Struct("<4sI"), struct.Struct(">4sI"), struct.Struct(">4sQ")
_LAYOUTS = {
    b"RIFF": _Layout(12, _LITTLE, b"data"),
    b"RIFX": _Layout(12, _BIG, b"data"),
    b"RF64": _Layout(12, _LITTLE, b"data"),
    b"BW64": _Layout(12, _LITTLE, b"data"),
    b"FORM": _Layout(12, _BIG, b"SSND"),
    b"caff": _Layout(8, _LONG, b"data"),
}
_RF64 = (b"RF64", b"BW64")
_IN_DS64, _DS64_SIZE_PLACE = 0xFFFFFFFF, 28
_MAX_BYTES = 2**32 - 1
"""Longer files are left to libsndfile: RIFF has no sizes for them."""
_OPEN_BYTES, _SLACK_BYTES = 0x7FFF0000, 4_096
"""Writers into pipes announce so much or more: nothing is missing then. Nor is it worth a word where little is."""
_KNOWN_CHUNKS = {
    b"LIST", b"id3 ", b"ID3 ", b"bext", b"cue ", b"iXML", b"PEAK", b"JUNK", b"_PMX", b"smpl", b"afsp", b"(c) ",
}  # fmt: skip
_MAX_CHUNKS = 1_000
_FLAC_TAIL_BYTES = 65_536
_FLAC_CANDIDATES = 64
_FLAC_SYNCS = (b"\xff\xf8", b"\xff\xf9")
"""How frames begin whose blocks are equally long, and others."""
_OGG_HEADER_BYTES = 27


def corrected(data: bytes, kind: str) -> tuple[bytes, str | None] | None:
    """A file with a header that announces what is there, and a note where it did not; None where all is well.

    Args:
        data: The whole file.
        kind: What it is, as `find_kind` says.
    """
    if data[:3] == b"ID3" and kind in ("WAV", "FLAC"):
        data = data[skip_id3(data) :]
    if kind in ("WAV", "AIFF", "CAF") and data[:4] in _LAYOUTS:
        return _chunked(data, kind, _LAYOUTS[data[:4]])
    if kind == "FLAC":
        longer = _flac(data)
        return None if longer is None else (longer, _more(kind))
    if kind == "AU":
        return _au(data)
    if kind.startswith("Ogg") and _is_cut_ogg(data):
        return data, f"{kind} is cut short: its last page is not whole"
    return None


def _more(kind: str) -> str:
    return f"{kind} holds more than its header announces: all of it is used"


def _less(kind: str, announced: int, there: int) -> str | None:
    if announced >= _OPEN_BYTES or announced - there <= _SLACK_BYTES:
        return None
    return f"{kind} is cut short: {there:,} of the {announced:,} bytes of its samples are there"


def _chunked(data: bytes, kind: str, layout: _Layout) -> tuple[bytes, str | None] | None:
    found = _find_samples(data, layout) if len(data) <= _MAX_BYTES else None
    if found is None:
        return None
    start, announced = found
    size = there = len(data) - start
    if announced >= there:
        note = _less(kind, announced, there)
        is_read = size == announced or layout.chunk is not _LONG  # else libsndfile ends with the file by itself
    elif _holds_no_samples(data, start + announced, layout.chunk):
        size, note, is_read = announced, None, True
    else:
        note, is_read = _more(kind), False
    if is_read and data[:4] not in _RF64:
        return None if note is None else (data, note)
    head = bytearray(data[:start])
    if layout.chunk is not _LONG:
        layout.chunk.pack_into(head, 0, b"RIFF" if data[:4] in _RF64 else data[:4], len(data) - 8)
    layout.chunk.pack_into(head, start - layout.chunk.size, layout.samples, size)
    return bytes(head) + data[start:], note


def _find_samples(data: bytes, layout: _Layout) -> tuple[int, int] | None:
    """Where the samples start, and how many bytes of them are announced."""
    position = layout.first
    for _ in range(_MAX_CHUNKS):
        if position + layout.chunk.size > len(data):
            return None
        name, size = layout.chunk.unpack_from(data, position)
        position += layout.chunk.size
        if name == layout.samples:
            if size == _IN_DS64 and data[:4] in _RF64 and data[12:16] == b"ds64":
                size = int.from_bytes(data[_DS64_SIZE_PLACE : _DS64_SIZE_PLACE + 8], "little")
            return position, size
        position += _padded(size, layout.chunk)
    return None


def _padded(size: int, chunk: struct.Struct) -> int:
    return size if chunk is _LONG else size + size % 2


def _holds_no_samples(data: bytes, end: int, chunk: struct.Struct) -> bool:
    """Whether what stands behind the announced samples is something else: chunks, tags, padding."""
    rest = data[end : end + 65_536]
    if rest.startswith(TAGS) or not any(rest):
        return True
    return any(_are_chunks(data, end + padding, chunk) for padding in (end % 2, 0))


def _are_chunks(data: bytes, position: int, chunk: struct.Struct) -> bool:
    for _ in range(_MAX_CHUNKS):
        if len(data) - position < chunk.size:  # a chunk may lack its byte of padding, or have some more
            return True
        name, size = chunk.unpack_from(data, position)
        if name in _KNOWN_CHUNKS and position + size > len(data):
            return True  # cut short
        if not (name in _KNOWN_CHUNKS or (name.isascii() and name.strip(b" ").replace(b"_", b"").isalnum())):
            return data[position : position + 8].startswith(TAGS) or not any(data[position : position + 65_536])
        position += chunk.size + _padded(size, chunk)
        if position > len(data) + 1:
            return False
    return True


def _au(data: bytes) -> tuple[bytes, str | None] | None:
    start, announced = (int.from_bytes(data[place : place + 4], "big") for place in (4, 8))
    there = len(data) - start
    if announced < there and start >= 24:
        return data[:8] + b"\xff" * 4 + data[12:], _more("AU")
    note = _less("AU", announced, there)
    return None if note is None else (data, note)


def _is_cut_ogg(data: bytes) -> bool:
    """Whether the file ends within a page: behind the page's header comes the length of each of its segments."""
    page = data.rfind(b"OggS")
    table = page + _OGG_HEADER_BYTES
    if page < 0 or table > len(data):
        return True
    lengths = data[table : table + data[table - 1]]
    return len(lengths) < data[table - 1] or table + len(lengths) + sum(lengths) > len(data)


def _flac(data: bytes) -> bytes | None:
    """Compares the number in STREAMINFO with the last frames. Bytes that look like a frame by chance do no harm where
    it is right, because the last frame says so, too."""
    if len(data) < 42 or data[4] & 0x7F != 0:
        return None
    block_size = int.from_bytes(data[10:12], "big")
    announced = int.from_bytes(data[21:26], "big") & (1 << 36) - 1
    if announced == 0:  # unknown, and libsndfile reads on
        return None
    low = max(42, len(data) - _FLAC_TAIL_BYTES)
    largest = 0
    latest = {sync: data.rfind(sync, low) for sync in _FLAC_SYNCS}
    for _ in range(_FLAC_CANDIDATES):
        sync = max(latest, key=latest.__getitem__)
        at = latest[sync]
        if at < 0:
            break
        last = _frame_end(data[at : at + 16], block_size)
        if last == announced:
            return None
        largest = max(largest, last)
        latest[sync] = data.rfind(sync, low, at)
    if largest < announced or largest >= 1 << 36:
        return None
    return (
        data[:21]
        + (data[21] & 0xF0 | largest >> 32).to_bytes(1, "big")
        + struct.pack(">I", largest & 2**32 - 1)
        + data[26:]
    )


def _frame_end(header: bytes, stream_block_size: int) -> int:
    """The sample behind a FLAC frame; 0 where its header is none."""
    if len(header) < 16:
        header += bytes(16 - len(header))
    size_code, rate_code = header[2] >> 4, header[2] & 15
    if size_code == 0 or rate_code == 15 or header[3] & 1:
        return 0
    ones = 8 - (header[4] ^ 0xFF).bit_length()  # the number is coded as in UTF-8, in up to 7 bytes
    if ones == 1 or ones == 8:
        return 0
    number = header[4] & (0x7F >> ones)
    position = 4 + max(1, ones)
    for byte in header[5:position]:
        number = number << 6 | byte & 0x3F
    size = 192 if size_code == 1 else 576 << max(0, size_code - 2) if size_code < 6 else 256 << max(0, size_code - 8)
    if size_code in (6, 7):
        length = size_code - 5
        size = int.from_bytes(header[position : position + length], "big") + 1
        position += length
    position += {12: 1, 13: 2, 14: 2}.get(rate_code, 0)
    if _crc8(header[:position]) != header[position]:
        return 0
    return size + (number if header[1] & 1 else number * stream_block_size)


def _crc8_of(value: int) -> int:
    for _ in range(8):
        value = (value << 1 ^ (0x07 if value & 0x80 else 0)) & 0xFF
    return value


_CRC8 = bytes(map(_crc8_of, range(256)))


def _crc8(data: bytes) -> int:
    value = 0
    for byte in data:
        value = _CRC8[value ^ byte]
    return value
