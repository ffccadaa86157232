"""MP3s: their length, and those that are cut."""

from __future__ import annotations

import numpy as np
import pytest

from clap_zero.audio.decode import AudioError, decode
from tests.unit.audio.sounds import encode, noise

ID3_TAG = b"ID3\x03\x00\x00" + bytes([0, 12, 26, 64]) + b"\0" * 200_000


def without_header_frame(mp3: bytes) -> bytes:
    """The MP3 without its first frame, which holds the Xing header: as `ffmpeg -write_xing 0` writes it."""
    tag = max(mp3[:200].find(b"Xing"), mp3[:200].find(b"Info"))
    assert tag > 0
    return mp3[mp3.index(mp3[:2], tag) :]


def with_announced_frames(mp3: bytes, num_frames: int) -> bytes:
    tag = max(mp3[:200].find(b"Xing"), mp3[:200].find(b"Info"))
    return mp3[: tag + 8] + num_frames.to_bytes(4, "big") + mp3[tag + 12 :]


@pytest.mark.parametrize(("mode", "rate_hz"), [("VARIABLE", 48_000), ("VARIABLE", 24_000), ("CONSTANT", 44_100)])
def test_mp3_length_is_counted(mode, rate_hz):
    # 0, too few, too many frames announced, or none.
    samples = noise(25, rate_hz=rate_hz)
    mp3 = encode(samples, "MP3", rate_hz=rate_hz, bitrate_mode=mode, compression_level=0.7)
    files = [mp3, without_header_frame(mp3), *(with_announced_frames(mp3, n) for n in (0, 10, 100_000, 2**32 - 1))]
    for data in [*files, ID3_TAG + mp3]:
        audio = decode(data, max_seconds=60)
        assert abs(audio.samples.size / rate_hz - 25) < 0.06
        for seed in range(3):
            crop = decode(data, max_seconds=10, rng=np.random.default_rng(seed)).samples
            assert crop.size == 10 * rate_hz and np.abs(crop[-1000:]).max() > 0.01


def test_an_mp3_crop_is_where_it_should_be():
    mp3 = encode(noise(8), "MP3")
    whole = decode(mp3, max_seconds=60).samples
    part = decode(mp3, start_s=3, duration_s=2, max_seconds=60).samples
    np.testing.assert_allclose(part, whole[3 * 48_000 : 5 * 48_000], atol=1e-6)


@pytest.mark.parametrize("kept", [20, 100, 200])
def test_an_mp3_cut_in_its_header_is_refused(kept):
    mp3 = encode(noise(1), "MP3")
    with pytest.raises(AudioError):
        decode(mp3[: mp3.index(b"Info" if b"Info" in mp3[:99] else b"Xing") + kept], max_seconds=60)


def test_an_mp3_cut_short_says_so():
    mp3 = encode(noise(20), "MP3")
    audio = decode(mp3[: len(mp3) // 2], max_seconds=60)
    assert 9.5 < audio.samples.size / 48_000 < 10.1 and "cut short" in audio.note


def test_the_tags_of_joined_mp3s_are_passed_over():
    mp3 = encode(noise(3), "MP3")
    tags = b"TAG" + bytes(125) + b"ID3\4\0\0" + bytes([0, 0, 20, 10]) + b"title" + bytes(2_565)
    audio = decode(mp3 + tags + mp3 + tags, max_seconds=60)
    assert abs(audio.samples.size / 48_000 - 6) < 0.1 and audio.note is None
    assert np.abs(audio.samples[-24_000:]).max() > 0.01 and np.abs(audio.samples).max() < 0.6


@pytest.mark.parametrize("behind", [0, 290, 5_000])
def test_a_tag_may_be_longer_than_it_says(behind):
    mp3 = encode(noise(2), "MP3")
    data = b"ID3\4\0\0" + bytes([0, 0, 0, 10]) + bytes(10 + behind) + mp3
    assert decode(data, max_seconds=60).samples.size == decode(mp3, max_seconds=60).samples.size
