"""Gives an MP3 stream the frame count that it really has.

libsndfile (mpg123) takes the length of an MP3 from its Xing, Info or VBRI header, or guesses it from the bit rate of
the first frame, and never reads past it: without a header a variable-rate clip of 25 s can end after 8 s. So the frames
are counted here, which takes about 1 ms a minute, and the header is corrected or added.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from clap_zero.audio.kinds import TAGS, skip_id3

_BIT_RATES_V1 = (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320)
_BIT_RATES_V2 = (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160)
_SAMPLE_RATES_HZ = {3: (44_100, 48_000, 32_000), 2: (22_050, 24_000, 16_000), 0: (11_025, 12_000, 8_000)}
_MAX_RESYNCS = 100_000


@dataclass(frozen=True)
class Mp3Stream:
    """An MP3 stream from its first frame on, with a header that tells its true length, without tags between its frames.

    Attributes:
        data: The stream.
        note: One line where the file's own header claims more than there is.
    """

    data: bytes
    note: str | None


def _frame_size(data: bytes, position: int) -> int:
    """Size in bytes of the Layer III frame at `position`; 0 where there is none (or one of free format)."""
    if position + 4 > len(data) or data[position] != 0xFF or data[position + 1] & 0xE6 != 0xE2:
        return 0
    version = data[position + 1] >> 3 & 3
    rate_index = data[position + 2] >> 2 & 3
    bit_rate_index = data[position + 2] >> 4
    if version == 1 or rate_index == 3 or bit_rate_index in (0, 15):
        return 0
    bits = (_BIT_RATES_V1 if version == 3 else _BIT_RATES_V2)[bit_rate_index] * 1000
    padding = data[position + 2] >> 1 & 1
    return (144 if version == 3 else 72) * bits // _SAMPLE_RATES_HZ[version][rate_index] + padding


def _next_frame(data: bytes, position: int, like: bytes | None) -> int:
    """The next position from `position` on where two frames follow each other (or one ends the data); -1 without one.

    `like` is the header of the stream's first frame: version, layer and sampling rate do not change within a stream.
    """
    for _ in range(_MAX_RESYNCS):
        position = data.find(b"\xff", position)
        if position < 0:
            return -1
        size = _frame_size(data, position)
        if size and (like is None or _same_stream(data, position, like)):
            end = position + size
            if end >= len(data) or (_frame_size(data, end) and _same_stream(data, end, data[position : position + 4])):
                return position
        position += 1
    return -1


def _same_stream(data: bytes, position: int, like: bytes) -> bool:
    return data[position + 1] & 0xFE == like[1] & 0xFE and data[position + 2] & 0x0C == like[2] & 0x0C


def _count_frames(data: bytes, first: int) -> tuple[int, list[tuple[int, int]]]:
    """How many frames there are, and the places (first byte, end) of the stretches that tags stand between."""
    like = data[first : first + 4]
    num_frames, position = 0, first
    stretches: list[tuple[int, int]] = []
    while 0 <= position < len(data):
        size = _frame_size(data, position)
        if size and _same_stream(data, position, like):
            # A last frame that is cut is not decoded.
            num_frames += position + size <= len(data)
            position += size
        else:
            following = _next_frame(data, position + 1, like)
            if following > 0 and data[position : position + 8].startswith(TAGS):
                stretches.append((first, position))
                first = following
            position = following
    return num_frames, [*stretches, (first, len(data))]


def _side_info_size(header: bytes) -> int:
    mono = header[3] >> 6 == 3
    if header[1] >> 3 & 3 == 3:
        return 17 if mono else 32
    return 9 if mono else 17


def _count_field(frame: bytes) -> int | None:
    """Offset of the 32-bit frame count in an information frame; None where `frame` is an ordinary one.

    Sources: "MP3 Info Tag rev 1" (LAME) for Xing and Info, Fraunhofer's VBRI layout for the other.
    """
    tag = 4 + _side_info_size(frame[:4])
    if frame[tag : tag + 4] in (b"Xing", b"Info") and len(frame) >= tag + 12 and frame[tag + 7] & 1:
        return tag + 8
    return 36 + 14 if frame[36:40] == b"VBRI" else None


def _information_frame(header: bytes, num_frames: int) -> bytes:
    """A silent frame with a Xing header, of the same stream as `header`."""
    # No CRC, 128 kbit/s (80 for MPEG 2), no padding.
    own = bytes([0xFF, header[1] | 1, 9 << 4 | header[2] & 0x0C, header[3]])
    frame = bytearray(_frame_size(own, 0))
    frame[:4] = own
    tag = 4 + _side_info_size(own)
    frame[tag : tag + 12] = b"Xing" + struct.pack(">II", 1, num_frames)
    return bytes(frame)


def with_true_length(data: bytes) -> Mp3Stream | None:
    """Counts the frames of an MP3 and corrects or adds the header that announces them.

    Returns:
        The stream; None where no Layer III frames were found (Layer I or II, free format, or no MP3 at all).
    """
    first = _next_frame(data, skip_id3(data), None)
    if first < 0:
        return None
    header = data[first : first + 4]
    size = _frame_size(data, first)
    version = header[1] >> 3 & 3
    frame_s = (1152 if version == 3 else 576) / _SAMPLE_RATES_HZ[version][header[2] >> 2 & 3]
    num_frames, stretches = _count_frames(data, first)
    if len(stretches) > 1:  # files that were joined: mpg123 gives up at long tags
        data, first = b"".join(data[begin:end] for begin, end in stretches), 0
    field = _count_field(data[first : first + size])
    if field is None or first + field + 4 > len(data):
        return Mp3Stream(_information_frame(header, num_frames) + data[first:], None)
    announced = int.from_bytes(data[first + field : first + field + 4], "big")
    num_frames = max(0, num_frames - 1)  # where the header's own frame is cut, it was not counted
    note = None
    if (announced - num_frames) * frame_s > 0.1:
        note = f"MP3 is cut short: {num_frames * frame_s:.2f} s of {announced * frame_s:.2f} s are there"
    stream = bytearray(data[first:])
    stream[field : field + 4] = num_frames.to_bytes(4, "big")
    if stream[field - 8 : field - 4] in (b"Xing", b"Info") and stream[field - 1] & 2:
        # The size of the stream follows; mpg123 complains on stderr about a wrong one.
        stream[field + 4 : field + 8] = len(stream).to_bytes(4, "big")
    return Mp3Stream(bytes(stream), note)
