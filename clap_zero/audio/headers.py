"""WAV and FLAC headers that announce less than there is: writers that were killed, or that never came back to them.

libsndfile reads no further than a header says, so a recording of a minute could be one of a second, in silence. (What
announces too much, or nothing, shows when it is decoded.)

Sources: "Multimedia Programming Interface and Data Specifications 1.0" (RIFF), RFC 9639 (FLAC).
"""

from __future__ import annotations

import struct

_CHUNK = struct.Struct("<4sI")
_KNOWN_CHUNKS = {b"LIST", b"id3 ", b"ID3 ", b"bext", b"cue ", b"iXML", b"PEAK", b"JUNK", b"_PMX", b"smpl", b"afsp"}
_TAGS = (b"TAG", b"ID3", b"APETAGEX", b"LYRICS")
_MAX_CHUNKS = 1_000
_FLAC_TAIL_BYTES = 65_536
_FLAC_CANDIDATES = 64
_FLAC_SYNCS = (b"\xff\xf8", b"\xff\xf9")
"""How frames begin whose blocks are equally long, and others."""


def with_all_samples(data: bytes, kind: str) -> bytes | None:
    """The file with a header that announces all its samples; None where it does already, or the kind is another.

    Args:
        data: The whole file.
        kind: What it is, as `find_kind` says.
    """
    if kind == "WAV" and data[:4] == b"RIFF":
        return _wav(data)
    if kind == "FLAC" and data[:4] == b"fLaC":
        return _flac(data)
    return None


def _wav(data: bytes) -> bytes | None:
    found = _find_data_chunk(data)
    if found is None:
        return None
    start, size = found
    if start + size >= len(data) or _holds_no_samples(data, start + size):
        return None
    riff, chunk = struct.pack("<I", min(len(data) - 8, 2**32 - 1)), struct.pack("<I", len(data) - start)
    return data[:4] + riff + data[8 : start - 4] + chunk + data[start:]


def _find_data_chunk(data: bytes) -> tuple[int, int] | None:
    """Where the samples start, and how many bytes of them are announced."""
    position = 12
    for _ in range(_MAX_CHUNKS):
        if position + _CHUNK.size > len(data):
            return None
        name, size = _CHUNK.unpack_from(data, position)
        position += _CHUNK.size
        if name == b"data":
            return position, size
        position += size + size % 2
    return None


def _holds_no_samples(data: bytes, end: int) -> bool:
    """Whether what stands behind the announced samples is something else: chunks, tags, padding."""
    rest = data[end : end + 65_536]
    if rest.startswith(_TAGS) or not any(rest):
        return True
    return any(_are_chunks(data, end + padding) for padding in (end % 2, 0))


def _are_chunks(data: bytes, position: int) -> bool:
    for _ in range(_MAX_CHUNKS):
        if len(data) - position < _CHUNK.size:  # a chunk may lack its byte of padding, or have some more
            return True
        name, size = _CHUNK.unpack_from(data, position)
        if name in _KNOWN_CHUNKS and position + size > len(data):
            return True  # cut short
        if not (name.isascii() and name.strip(b" ").replace(b"_", b"").isalnum()):
            return data[position : position + 8].startswith(_TAGS) or not any(data[position : position + 65_536])
        position += _CHUNK.size + size + size % 2
        if position > len(data) + 1:
            return False
    return True


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
