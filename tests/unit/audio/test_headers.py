"""Headers that announce other than there is."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from clap_zero.audio import pcm
from clap_zero.audio.decode import decode, load_clip
from clap_zero.audio.headers import corrected
from clap_zero.audio.kinds import find_kind
from clap_zero.audio.pcm import load_pcm
from clap_zero.audio.waveform import to_int16
from tests.unit.audio.sounds import encode, noise, real_clips

CLIP = noise(3)


def wav(announced: int, behind: bytes = b"") -> bytes:
    """CLIP with a header that announces so many samples; both sizes agree, as those of a writer that was killed."""
    whole = encode(CLIP, "WAV", subtype="PCM_16")
    at = whole.index(b"data")
    sizes = struct.pack("<I", at + 2 * announced), struct.pack("<I", 2 * announced)
    return whole[:4] + sizes[0] + whole[8 : at + 4] + sizes[1] + whole[at + 8 :] + behind


def flac(announced: int, samples: np.ndarray = CLIP) -> bytes:
    whole = bytearray(encode(samples, "FLAC", subtype="PCM_16"))
    value = int.from_bytes(whole[18:26], "big") >> 36 << 36 | announced
    whole[18:26] = value.to_bytes(8, "big")
    return bytes(whole)


@pytest.mark.parametrize("make", [wav, flac])
@pytest.mark.parametrize("announced", [1, 4_096, 48_001, CLIP.size - 5])
def test_all_samples_are_used_and_a_note_says_so(make, announced):
    notes: list[str] = []
    got = load_pcm(make(announced), max_seconds=60, notes=notes)
    np.testing.assert_array_equal(got, load_pcm(make(CLIP.size), max_seconds=60))
    assert got.size == CLIP.size and len(notes) == 1 and "more than its header announces" in notes[0]


def wide(riff: bytes, announced: int, *, in_chunk: int = 2**32 - 1) -> bytes:
    """CLIP as RF64 or BW64, whose sizes stand in a chunk of their own, with another one of odd length behind it."""
    whole = wav(CLIP.size)
    sizes = b"ds64" + struct.pack("<IQQQI", 28, len(whole), 2 * announced, 0, 0)
    samples = b"data" + struct.pack("<I", in_chunk) + whole[44:]
    return riff + b"\xff" * 4 + b"WAVE" + sizes + whole[12:36] + b"JUNK" + struct.pack("<I", 3) + b"abc\0" + samples


def placed(data: bytes, name: bytes, form: str, number: int) -> bytes:
    """The file with another number behind a name."""
    at = data.index(name) + len(name)
    return data[:at] + struct.pack(form, number) + data[at + struct.calcsize(form) :]


def big_endian(announced: int) -> bytes:
    whole = wav(CLIP.size)
    head = (
        b"RIFX"
        + struct.pack(">I", len(whole) - 8)
        + b"WAVEfmt "
        + struct.pack(">IHHIIHH", 16, 1, 1, 48_000, 96_000, 2, 16)
    )
    return head + b"data" + struct.pack(">I", 2 * announced) + np.frombuffer(whole[44:], "<i2").astype(">i2").tobytes()


def aiff(announced: int) -> bytes:
    return placed(encode(CLIP, "AIFF", subtype="PCM_16"), b"SSND", ">I", 2 * announced + 8)


def au(announced: int) -> bytes:
    data = encode(CLIP, "AU", subtype="PCM_16")
    return data[:8] + struct.pack(">I", 2 * announced) + data[12:]


def caf(announced: int) -> bytes:
    return placed(encode(CLIP, "CAF", subtype="PCM_16"), b"data", ">Q", 2 * announced + 4)


OTHERS = {
    "RIFX": big_endian,
    "RF64": lambda announced: wide(b"RF64", announced),
    "BW64": lambda announced: wide(b"BW64", announced),
    "AIFF": aiff,
    "AU": au,
    "CAF": caf,
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_kinds_whose_headers_are_wrong(name):
    expected = load_pcm(wav(CLIP.size), max_seconds=60)
    for announced in (CLIP.size, 500, 0):
        notes: list[str] = []
        got = load_pcm(OTHERS[name](announced), max_seconds=60, notes=notes)
        np.testing.assert_array_equal(got, expected, err_msg=str(announced))
        assert len(notes) == (announced != CLIP.size) and all("more than its header announces" in n for n in notes)


@pytest.mark.parametrize("name", ["RIFF", *OTHERS])
def test_a_file_that_was_cut_says_so(name):
    whole = {"RIFF": wav, **OTHERS}[name](CLIP.size)
    notes: list[str] = []
    got = load_pcm(whole[: len(whole) // 2], max_seconds=60, notes=notes)
    np.testing.assert_array_equal(got, load_pcm(whole, max_seconds=60)[: got.size])
    assert got.size > CLIP.size * 0.48 and len(notes) == 1 and "is cut short: " in notes[0]


@pytest.mark.parametrize("size", [2**31 - 1, 2**32 - 1, 2**32 - 37])
def test_a_wav_that_was_written_into_a_pipe_is_whole(size):
    notes: list[str] = []
    for data in (placed(wav(CLIP.size), b"data", "<I", size), wide(b"RF64", 2**63 - 1), caf(2**63 - 3)):
        assert load_pcm(data, max_seconds=60, notes=notes).size == CLIP.size
    assert notes == []


@pytest.mark.parametrize("subtype", ["VORBIS", "OPUS"])
def test_an_ogg_that_was_cut_says_so(subtype):
    data = encode(CLIP, "OGG", subtype=subtype)
    assert decode(data, max_seconds=60).note is None is decode(data + b"junk", max_seconds=60).note
    audio = decode(data[: len(data) * 2 // 3], max_seconds=60)
    assert audio.note is not None and "cut short" in audio.note and audio.samples.size > 40_000


@pytest.mark.parametrize(("make", "kind"), [(wav, "WAV"), (flac, "FLAC")])
def test_a_tag_in_front_hides_no_header(make, kind):
    data = b"ID3\4\0\0\0\0\1\0" + bytes(128) + make(500)
    assert find_kind(data) == kind and load_clip(data, max_seconds=60).size == CLIP.size


@pytest.mark.parametrize("make", [wav, flac])
def test_crops_are_drawn_from_all_of_it(make):
    parts = [decode(make(n), max_seconds=1, rng=np.random.default_rng(5)) for n in (4_096, CLIP.size)]
    np.testing.assert_array_equal(parts[0].samples, parts[1].samples)
    assert parts[0].note is not None and parts[1].note is None


@pytest.mark.parametrize(
    "behind",
    [
        b"",
        b"\0",
        b"\0" * 3_000,
        b"LIST" + struct.pack("<I", 4) + b"INFO",
        b"LIST" + struct.pack("<I", 4_000) + b"INFO cut",
        b"id3 " + struct.pack("<I", 3) + b"abc" + b"LIST" + struct.pack("<I", 0),
        b"x_1 " + struct.pack("<I", 3) + b"abc\0" + b"\0" * 99,
        b"TAGSome title" + bytes(115),
        b"ID3\4\0\0\0\0\0\x0aabcdefghij",
    ],
)
def test_what_follows_the_samples_is_no_sound(behind):
    assert corrected(wav(CLIP.size, behind), "WAV") is None
    assert load_clip(wav(CLIP.size, behind), max_seconds=60).size == CLIP.size


@pytest.mark.parametrize("subtype", ["PCM_S8", "PCM_16", "PCM_24"])
@pytest.mark.parametrize("num_samples", [1, 15, 16, 4_095, 4_096, 4_097, 70_000, 480_000])
def test_a_true_flac_header_is_left_alone(subtype, num_samples):
    samples = real_clips((num_samples,))[0]
    for level in (0.0, 1.0):
        data = encode(samples, "FLAC", subtype=subtype, compression_level=level)
        assert corrected(data, "FLAC") is None
        assert corrected(data[: len(data) // 2], "FLAC") is None


def test_damaged_headers_raise_nothing():
    rng = np.random.default_rng(0)
    for whole in (wav(100), flac(100), wav(CLIP.size)):
        for _ in range(300):
            data = bytearray(whole[: rng.integers(1, 300)] + whole[-int(rng.integers(1, 300)) :])
            for place in rng.integers(0, len(data), 3):
                data[place] = rng.integers(256)
            corrected(bytes(data), find_kind(bytes(data)))


@pytest.mark.parametrize("seed", range(4))
def test_a_drawn_part_of_a_damaged_file_is_the_same_on_both_ways(seed):
    """The straight way draws before it finds the damage; the way over float must not draw from there on."""
    whole = encode(noise(20), "FLAC", subtype="PCM_16")
    cut = whole[: len(whole) // 2]
    assert pcm.find_kind(cut) == "FLAC"
    got = load_pcm(cut, max_seconds=2, rng=np.random.default_rng(seed))
    np.testing.assert_array_equal(got, to_int16(load_clip(cut, max_seconds=2, rng=np.random.default_rng(seed))))


@pytest.mark.parametrize("gap", [1, 63, 64, 5_000])
def test_an_mp3_behind_a_gap_is_found(gap):
    data = encode(noise(1), "MP3")
    assert find_kind(bytes(gap) + data) == "MP3"
    assert load_clip(bytes(gap) + data, max_seconds=60).size == load_clip(data, max_seconds=60).size
    assert find_kind(bytes(gap + 64)) == "zero bytes" == find_kind(bytes(gap + 64) + b"\xff\xf1\x50\x80")
