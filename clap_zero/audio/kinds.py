"""What a file is, told from its first bytes (names and suffixes lie)."""

from __future__ import annotations

import re

from clap_zero.errors import DataError


class AudioError(DataError):
    """A clip that cannot be used; `reason` is one line that fits behind a key, and names the format that was found."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


SOUNDFILE_KINDS = frozenset(
    {"WAV", "FLAC", "Ogg Vorbis", "Ogg Opus", "Ogg FLAC", "MP3", "AIFF", "AU", "CAF", "W64", "NIST SPHERE"}
)
"""Kinds that libsndfile decodes by itself."""

FFMPEG_KINDS = frozenset(
    {"MP4/M4A", "WebM/Matroska", "AAC", "WMA/ASF", "AMR", "Monkey's Audio", "WavPack", "Ogg Speex", "FLV", "MPEG-TS"}
)
"""Kinds that need torchcodec and FFmpeg."""

OTHER_KINDS = frozenset(
    {"HTML or XML", "JSON", "PNG", "JPEG", "ZIP", "gzip", "PDF", "MIDI", "Git LFS pointer", "an ID3 tag", "zero bytes"}
)
"""Kinds that turn up where audio was expected, and hold none."""

_MAGIC: tuple[tuple[int, bytes, str], ...] = (
    (0, b"fLaC", "FLAC"),
    (4, b"ftyp", "MP4/M4A"),
    (0, b"NIST_1A", "NIST SPHERE"),
    (0, b"\x1aE\xdf\xa3", "WebM/Matroska"),
    (0, b".snd", "AU"),
    (0, b"caff", "CAF"),
    (0, b"riff\x2e\x91\xcf\x11", "W64"),
    (0, b"0&\xb2u\x8ef\xcf\x11", "WMA/ASF"),
    (0, b"#!AMR", "AMR"),
    (0, b"MAC ", "Monkey's Audio"),
    (0, b"wvpk", "WavPack"),
    (0, b"FLV\x01", "FLV"),
    (0, b"MThd", "MIDI"),
    (0, b"\x89PNG", "PNG"),
    (0, b"\xff\xd8\xff", "JPEG"),
    (0, b"PK\x03\x04", "ZIP"),
    (0, b"\x1f\x8b", "gzip"),
    (0, b"%PDF", "PDF"),
    (0, b"version https://git-lfs", "Git LFS pointer"),
)

TAGS = (b"TAG", b"ID3", b"APETAGEX", b"LYRICS")
"""What tags begin with that stand behind or between sound."""

_NOT_ZERO = re.compile(rb"[^\0]")

_OGG_CODECS = (
    (b"OpusHead", "Ogg Opus"),
    (b"\x01vorbis", "Ogg Vorbis"),
    (b"\x7fFLAC", "Ogg FLAC"),
    (b"Speex   ", "Ogg Speex"),
)


def skip_id3(data: bytes) -> int:
    """Where the content starts behind ID3v2 tags (header of 10 bytes, size in four 7-bit bytes, optional footer)."""
    position = 0
    while data[position : position + 3] == b"ID3" and len(data) >= position + 10:
        flags = data[position + 5]
        size = 0
        for byte in data[position + 6 : position + 10]:
            size = size << 7 | byte & 0x7F
        position += 10 + size + (10 if flags & 0x10 else 0)
    return position


def find_kind(data: bytes) -> str:
    """The kind of a file: a name from the sets above, or "unknown (starts with 3c 68 ...)"."""
    start = skip_id3(data)
    head = data[start : start + 64]
    if head[:1] == b"\0" and _is_mp3_behind_gap(data, start):
        return "MP3"
    if not any(head):
        return "an ID3 tag" if start else "zero bytes"
    for offset, magic, kind in _MAGIC:
        if head[offset : offset + len(magic)] == magic:
            return kind
    if head[:4] in (b"RIFF", b"RIFX", b"RF64", b"BW64") and head[8:12] == b"WAVE":
        return "WAV"
    if head[:4] == b"FORM" and head[8:12] in (b"AIFF", b"AIFC"):
        return "AIFF"
    if head[:4] == b"OggS":
        return next((kind for magic, kind in _OGG_CODECS if magic in head), "Ogg of an unknown codec")
    if (mpeg := _mpeg_kind(head)) is not None:
        return mpeg
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if text[:1] == b"<":
        return "HTML or XML"
    if text[:1] in (b"{", b"["):
        return "JSON"
    return f"unknown (starts with {head[:8].hex(' ')})"


def _mpeg_kind(head: bytes) -> str | None:
    """What a stream is that may begin with the header of an MPEG frame."""
    if len(head) > 2 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0:
        # Bits 1 and 2 are the MPEG layer; ADTS AAC has 0 there.
        return "MP3" if head[1] & 0x06 else "AAC"
    return None


def _is_mp3_behind_gap(data: bytes, start: int) -> bool:
    """Whether an MP3 stream follows zero bytes, which some programs leave that cut or write tags."""
    sound = _NOT_ZERO.search(data, start)
    return sound is not None and _mpeg_kind(data[sound.start() : sound.start() + 4]) == "MP3"
