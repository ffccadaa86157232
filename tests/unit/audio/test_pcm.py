from __future__ import annotations

import numpy as np
import pytest

from clap_zero.audio import pcm
from clap_zero.audio.decode import AudioError, load_clip
from clap_zero.audio.pcm import load_pcm
from clap_zero.audio.waveform import to_int16
from tests.unit.audio.sounds import encode, noise


@pytest.fixture
def asked(monkeypatch) -> list[bool]:
    """For each file, whether its samples came straight from the decoder."""
    straight: list[bool] = []
    original = pcm._straight

    def spy(*args):
        found = original(*args)
        straight.append(found is not None)
        return found

    monkeypatch.setattr(pcm, "_straight", spy)
    return straight


@pytest.mark.parametrize("kind", ["WAV", "FLAC"])
def test_every_16_bit_value_is_that_of_the_way_over_float(asked, kind):
    every = np.arange(-32768, 32768, dtype=np.int16)
    data = encode(np.random.default_rng(0).permutation(every), kind, subtype="PCM_16")
    got = load_pcm(data, max_seconds=60)
    assert asked == [True] and got.dtype == np.int16
    np.testing.assert_array_equal(got, to_int16(load_clip(data, max_seconds=60)))


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("buffer_size", [None, 10, 96_000])
def test_a_drawn_part_is_the_same_one(asked, seed, buffer_size):
    data = encode(noise(5), "FLAC", subtype="PCM_16")
    buffer = None if buffer_size is None else np.zeros(buffer_size, np.int16)
    got = load_pcm(data, max_seconds=2, rng=np.random.default_rng(seed), buffer=buffer)
    assert asked == [True] and got.size == 96_000
    assert np.shares_memory(got, buffer) if buffer_size == 96_000 else buffer_size is None or not buffer.any()
    np.testing.assert_array_equal(got, to_int16(load_clip(data, max_seconds=2, rng=np.random.default_rng(seed))))


@pytest.mark.parametrize(
    ("kind", "subtype", "rate_hz", "channels"),
    [
        ("FLAC", "PCM_24", 48_000, 1),
        ("FLAC", "PCM_16", 44_100, 1),
        ("WAV", "PCM_16", 48_000, 2),
        ("WAV", "FLOAT", 48_000, 1),
        ("WAV", "PCM_U8", 48_000, 1),
        ("MP3", None, 48_000, 1),
        ("OGG", "VORBIS", 48_000, 1),
    ],
)
def test_everything_else_goes_over_float(asked, kind, subtype, rate_hz, channels):
    samples = np.stack([noise(1, rate_hz=rate_hz, seed=seed) for seed in range(channels)], axis=1)
    data = encode(samples, kind, subtype=subtype, rate_hz=rate_hz)
    seconds: dict[str, float] = {}
    got = load_pcm(data, max_seconds=60, seconds=seconds, buffer=np.zeros(48_000, np.int16))
    assert asked == [False]
    np.testing.assert_array_equal(got, to_int16(load_clip(data, max_seconds=60)))
    assert seconds["decode"] > 0 and seconds["resample"] >= 0
    assert (seconds["resample"] > 1e-4) == (rate_hz != 48_000)


def test_a_damaged_file_goes_over_float_and_says_so(asked):
    whole = encode(noise(20), "FLAC", subtype="PCM_16")
    notes: list[str] = []
    got = load_pcm(whole[: len(whole) // 2], max_seconds=60, notes=notes)
    assert asked == [False] and 9 < got.size / 48_000 < 11 and "cut short" in notes[0]


@pytest.mark.parametrize("data", [b"", b"fLaC junk", b"RIFF\0\0\0\0WAVEjunk"])
def test_what_is_no_sound_is_refused(data):
    with pytest.raises(AudioError):
        load_pcm(data, max_seconds=60)
