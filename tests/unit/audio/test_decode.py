"""Decoding, and the files that stop a run elsewhere."""

from __future__ import annotations

import contextlib
import io
import random
import struct
import sys
import time
import tracemalloc
import types
import wave

import numpy as np
import pytest
import torch

from clap_zero.audio import ffmpeg
from clap_zero.audio.decode import AudioError, decode, load_clip
from clap_zero.errors import DataError
from tests.unit.audio.sounds import encode, noise, tone

ID3_ONLY = b"ID3\x03\x00\x00" + bytes([0, 12, 26, 64]) + b"APIC" + b"\0" * 200_000
M4A = b"\x00\x00\x00\x20ftypM4A \x00\x00\x02\x00" + b"\0" * 100
ADTS = b"\xff\xf1\x50\x80" + b"\0" * 99
WEBM = b"\x1aE\xdf\xa3\x9fB\x86\x81\x01" + b"\0" * 100


def flac_with_length(data: bytes, num_frames: int) -> bytes:
    """The FLAC with another number of samples (36 bits) in its header."""
    changed = bytearray(data)
    fields = int.from_bytes(data[18:26], "big") >> 36
    changed[18:26] = (fields << 36 | num_frames).to_bytes(8, "big")
    return bytes(changed)


@pytest.fixture
def no_ffmpeg(monkeypatch):
    monkeypatch.setattr(ffmpeg, "problem", lambda: "torchcodec finds no FFmpeg libraries")


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"", "0 bytes"),
        (ID3_ONLY, "ID3"),
        (b"\0" * 1000, "zero bytes"),
        (b"<!doctype html><p>404", "HTML"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "Git LFS"),
        (b"hello world", "68 65 6c 6c 6f"),
        (b"\xff\xfb" * 5000, "MP3"),
        (b"\xff\xfb\x94\xc4" + bytes(2000), "MP3 cannot be decoded: no frames were found"),
        (b"fLaC", "FLAC"),
    ],
)
def test_files_without_sound_are_refused_in_one_line(no_ffmpeg, data, named):
    with pytest.raises(AudioError) as caught:
        decode(data, max_seconds=60)
    assert isinstance(caught.value, DataError)
    assert named in caught.value.reason and "\n" not in caught.value.reason and "0x" not in caught.value.reason


def test_no_samples_are_refused():
    with pytest.raises(AudioError, match="no samples"):
        decode(encode(np.zeros(0, np.float32), "WAV"), max_seconds=60)
    with pytest.raises(AudioError, match="no samples"):
        decode(encode(noise(1), "WAV"), start_s=2, max_seconds=60)


@pytest.mark.parametrize("seed", [0, 1, 2, None])
def test_a_flac_cut_short_gives_its_readable_part(seed):
    # It still claims 30 s.
    samples = noise(30)
    data = encode(samples, "FLAC")
    cut = data[: len(data) * 2 // 5]
    rng = None if seed is None else np.random.default_rng(seed)
    begun = time.monotonic()
    audio = decode(cut, max_seconds=10 if seed is not None else 60, rng=rng)
    assert time.monotonic() - begun < 5
    assert "cut short" in audio.note and "FLAC" in audio.note
    if seed is None:
        assert 11.5 <= audio.samples.size / 48_000 <= 12.1
        np.testing.assert_allclose(audio.samples, samples[: audio.samples.size], atol=1e-4)
    else:
        assert audio.samples.size == 480_000
    notes: list[str] = []
    load_clip(cut, max_seconds=60, notes=notes)
    assert len(notes) == 1
    with pytest.raises(AudioError, match="no samples"):
        decode(cut, start_s=20, max_seconds=10)


@pytest.mark.parametrize("claimed", [0, 2**36 - 1])
def test_a_flac_that_lies_about_its_length(claimed):
    # 0 means unknown: what an encoder writes into a pipe. 2**36 - 1 samples are 16 days.
    samples = noise(12)
    data = flac_with_length(encode(samples, "FLAC"), claimed)
    whole = decode(data, max_seconds=60)
    assert whole.samples.size == samples.size and (whole.note is None) == (claimed == 0)
    drawn = decode(data, max_seconds=5, rng=np.random.default_rng(0))
    assert drawn.samples.size == 5 * 48_000
    tail = decode(data, start_s=11, max_seconds=60).samples
    np.testing.assert_allclose(tail, samples[-48_000:], atol=1e-4)


@pytest.mark.parametrize(("kind", "subtype"), [("WAV", "GSM610"), ("WAV", "G721_32"), ("AIFF", "DWVW_16")])
@pytest.mark.parametrize("seed", [0, None])
def test_a_codec_that_cannot_seek_is_read_whole(kind, subtype, seed):
    rng = None if seed is None else np.random.default_rng(seed)
    audio = decode(encode(noise(2), kind, subtype=subtype), max_seconds=60 if seed is None else 1, rng=rng)
    assert audio.samples.size == (96_000 if seed is None else 48_000) and audio.note is None


@pytest.mark.parametrize("seed", [0, None])
def test_a_flac_whose_table_of_places_is_wrong_is_read_whole(seed):
    data = encode(noise(4), "FLAC", subtype="PCM_16")
    table = b"".join(struct.pack(">QQH", 1_000 * n, 10**9 + n, 4_096) for n in range(100))
    data = data[:4] + bytes([data[4] & 0x7F]) + data[5:42] + b"\x03" + len(table).to_bytes(3, "big") + table + data[42:]
    rng = None if seed is None else np.random.default_rng(seed)
    audio = decode(data, max_seconds=60 if seed is None else 2, rng=rng)
    assert audio.samples.size == (192_000 if seed is None else 96_000) and audio.note is None


def test_claimed_hours_cost_no_memory():
    data = flac_with_length(encode(np.zeros(48_000 * 20, np.float32), "FLAC"), 2**36 - 1)
    tracemalloc.start()
    try:
        decode(data, max_seconds=10, rng=np.random.default_rng(0))
        assert tracemalloc.get_traced_memory()[1] < 30e6
    finally:
        tracemalloc.stop()


def test_a_header_that_points_before_the_file_prints_no_traceback(capfd):
    rng = random.Random(0)
    files = [encode(noise(0.05), "CAF"), encode(noise(0.05), "AIFF"), encode(noise(0.05), "WAV", subtype="GSM610")]
    for _ in range(600):
        changed = bytearray(rng.choice(files))
        at = rng.randrange(4, 64)
        changed[at : at + 4] = rng.choice((b"\xff" * 4, bytes(4), rng.randbytes(4)))
        with contextlib.suppress(AudioError):
            decode(bytes(changed), max_seconds=60)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("kind", "subtype", "tolerance"),
    [
        ("WAV", "PCM_U8", 0.03),
        ("WAV", "ULAW", 0.03),
        ("WAV", "PCM_16", 0.01),
        ("WAV", "PCM_24", 0.01),
        ("WAV", "PCM_32", 0.01),
        ("WAV", "FLOAT", 0.01),
        ("WAV", "DOUBLE", 0.01),
        ("FLAC", "PCM_24", 0.01),
        ("AIFF", "PCM_16", 0.01),
        ("W64", "PCM_16", 0.01),
        ("CAF", "PCM_16", 0.01),
        ("AU", "PCM_16", 0.01),
    ],
)
def test_every_bit_depth_has_the_same_scale(kind, subtype, tolerance):
    samples = decode(encode(tone(0.5), kind, subtype=subtype), max_seconds=60).samples
    # 8-bit encoding rounds down: half a step is 1/256.
    assert abs(np.abs(samples).max() / 0.5 - 1) <= tolerance and abs(samples.mean()) <= 1 / 256


@pytest.mark.parametrize(
    ("kind", "subtype", "found"),
    [("WAV", None, "WAV"), ("FLAC", None, "FLAC"), ("OGG", "VORBIS", "Ogg Vorbis"), ("OGG", "OPUS", "Ogg Opus")],
)
def test_only_the_wanted_part_is_decoded(kind, subtype, found):
    data = encode(noise(8), kind, subtype=subtype)
    whole = decode(data, max_seconds=60)
    part = decode(data, start_s=3, duration_s=2, max_seconds=60)
    assert whole.kind == found and whole.samples.size == 8 * 48_000 and whole.note is None
    np.testing.assert_allclose(part.samples, whole.samples[3 * 48_000 : 5 * 48_000], atol=2e-3)
    assert decode(data, max_seconds=1.5).samples.size == 72_000
    starts = {decode(data, max_seconds=1, rng=np.random.default_rng(seed)).samples[0] for seed in range(5)}
    assert len(starts) == 5


@pytest.mark.parametrize("kind", ["WAV", "FLAC"])
def test_channels_are_averaged(kind):
    # A tone only in the right rear of six; left = -right; one channel.
    six = np.zeros((4800, 6), dtype=np.float32)
    six[:, 5] = tone(0.1)
    audio = decode(encode(six, kind), max_seconds=60)
    assert audio.num_channels == 6 and audio.samples.shape == (4800,) and audio.samples.dtype == np.float32
    np.testing.assert_allclose(audio.samples, tone(0.1) / 6, atol=1e-4)
    left = tone(0.1)
    silence = decode(encode(np.stack([left, -left], axis=1), kind, subtype="PCM_16"), max_seconds=60).samples
    # The encoder rounds the two sides apart by one step of 16 bits.
    assert np.abs(silence).max() <= 2**-15
    assert decode(encode(left[:, None], kind), max_seconds=60).samples.shape == (4800,)


@pytest.mark.parametrize(
    ("data", "named"), [(M4A, "MP4/M4A"), (WEBM, "WebM"), (b"\xff\xf1\x50\x80" + b"\0" * 99, "AAC")]
)
def test_kinds_that_need_ffmpeg_are_named(no_ffmpeg, data, named):
    # Whatever the file was called, found by content.
    with pytest.raises(AudioError, match=named) as caught:
        load_clip(data, max_seconds=60)
    assert "FFmpeg" in caught.value.reason


def test_torchcodec_decodes_other_kinds_where_it_works(monkeypatch):
    asked: list[tuple[float, float]] = []

    class AudioDecoder:
        metadata = types.SimpleNamespace(sample_rate=24_000, duration_seconds=20.0)

        def __init__(self, data: bytes) -> None:
            assert data == M4A

        def get_samples_played_in_range(self, start: float, stop: float):
            asked.append((start, stop))
            return types.SimpleNamespace(data=torch.full((2, round((stop - start) * 24_000)), 0.25))

    monkeypatch.setattr(ffmpeg, "problem", lambda: None)
    monkeypatch.setitem(sys.modules, "torchcodec", types.ModuleType("torchcodec"))
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", types.SimpleNamespace(AudioDecoder=AudioDecoder))
    audio = decode(M4A, start_s=1, max_seconds=5)
    assert (audio.kind, audio.num_channels, audio.samples.size) == ("MP4/M4A", 2, 120_000)
    assert asked == [(1.0, 6.0)] and load_clip(M4A, max_seconds=5).size == 240_000


def wav_of_rate(rate_hz: int, num_samples: int) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(rate_hz)
        out.writeframes(b"\x01\x02" * num_samples)
    return file.getvalue()


@pytest.mark.parametrize("rate_hz", [1, 3_999, 384_001, 2_000_000_000])
def test_absurd_rates_are_refused(rate_hz):
    # 720,000 samples at 1 Hz are 200 hours, and 85 GB of resampling kernel.
    with pytest.raises(AudioError, match=f"{rate_hz:g} Hz".replace("+", r"\+")):
        load_clip(wav_of_rate(rate_hz, 720_000), max_seconds=60)


@pytest.mark.parametrize("rate_hz", [4_000, 8_000, 44_100, 384_000])
def test_usual_rates_come_out_at_48_khz(rate_hz):
    clip = load_clip(wav_of_rate(rate_hz, rate_hz // 2), max_seconds=60)
    assert clip.shape == (24_000,) and clip.dtype == np.float32
    assert load_clip(wav_of_rate(rate_hz, rate_hz), max_seconds=0.25).shape == (12_000,)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
def test_samples_that_are_no_sound_are_refused(bad):
    samples = noise(1)
    samples[1234] = bad
    with pytest.raises(AudioError, match="WAV holds"):
        decode(encode(samples, "WAV", subtype="FLOAT"), max_seconds=60)


def test_infinities_of_both_signs_are_refused_without_a_warning():
    samples = np.full((100, 2), np.inf, dtype=np.float32)
    samples[:, 1] = -np.inf
    with pytest.raises(AudioError, match="NaN or infinite"):
        decode(encode(samples, "WAV", subtype="FLOAT"), max_seconds=60)


@pytest.mark.parametrize("peak", [8.1, 32_768.0])
def test_float_files_of_another_scale_are_refused(peak):
    with pytest.raises(AudioError, match=f"WAV holds samples up to {peak:.6g}, full scale is 1"):
        decode(encode(tone(0.1, peak=peak), "WAV", subtype="FLOAT"), max_seconds=60)
    assert decode(encode(tone(0.1, peak=3), "WAV", subtype="FLOAT"), max_seconds=60).samples.max() > 2.9


def test_silence_and_very_short_clips_are_sound():
    assert not load_clip(encode(np.zeros(480_000, np.float32), "FLAC"), max_seconds=60).any()
    for num_samples in (1, 480, 43_200, 479_952):
        assert load_clip(encode(noise(10)[:num_samples], "WAV"), max_seconds=60).size == num_samples
    assert load_clip(encode(noise(1)[:1], "WAV", rate_hz=44_100), max_seconds=60).size == 2
