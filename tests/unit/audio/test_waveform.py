"""Mix-down, resampling, 16-bit round trip, padding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torchaudio

from clap_zero.audio import waveform
from tests.unit.audio.sounds import noise, tone


def test_opposite_channels_cancel_and_one_of_six_survives():
    # One stated rule, the mean.
    left = noise(0.1)
    silence = waveform.mix_down(np.stack([left, -left], axis=1))
    assert silence.shape == left.shape and not silence.any()
    six = np.zeros((4800, 6), dtype=np.float32)
    six[:, 5] = tone(0.1)
    mixed = waveform.mix_down(six)
    assert mixed.dtype == np.float32 and mixed.ndim == 1
    np.testing.assert_allclose(mixed, tone(0.1) / 6, rtol=1e-6)


@pytest.mark.parametrize("shape", [(100,), (100, 1)])
def test_mono_stays_as_it_is(shape):
    samples = noise(1)[:100]
    assert np.array_equal(waveform.mix_down(samples.reshape(shape)), samples)


@pytest.mark.parametrize("rate_hz", [8_000, 11_025, 22_050, 32_000, 44_100, 96_000])
def test_resampling_is_torchaudios_and_has_the_right_length(rate_hz):
    samples = noise(1.2345, rate_hz=rate_hz)
    ours = waveform.resample(samples, rate_hz, 48_000)
    theirs = torchaudio.functional.resample(torch.from_numpy(samples), rate_hz, 48_000).numpy()
    assert ours.dtype == np.float32 and ours.size == int(np.ceil(samples.size * 48_000 / rate_hz))
    # The function makes its kernel in float32, the cached one is made in float64.
    np.testing.assert_allclose(ours, theirs[: ours.size], rtol=0, atol=1e-5)


@pytest.mark.parametrize("rate_hz", [44_099, 47_999, 44_056, 5_513, 383_999])
def test_odd_rates_need_no_huge_kernel(rate_hz):
    # The exact kernel of 44,099 to 48,000 Hz has 2e9 numbers.
    ours = waveform.resample(tone(0.5, hz=500.0, rate_hz=rate_hz), rate_hz, 48_000)
    assert max(kernel_size(rate_hz), 1) <= 2 * waveform.MAX_KERNEL_SIZE
    assert ours.size == int(np.ceil(round(0.5 * rate_hz) * 48_000 / rate_hz))
    expected = tone(0.6, hz=500.0)[: ours.size]
    assert np.abs(ours - expected)[1000:-1000].max() < 0.03


def kernel_size(rate_hz: int) -> int:
    down, up = waveform._ratio(rate_hz, 48_000)
    return waveform._resampler(down, up).kernel.numel() if down != up else 0


def test_sixteen_bit_round_trip_is_laions():
    # float32_to_int16: clamp to [-1, 1], times 32767, truncated; int16_to_float32: divided by 32767.
    samples = np.array([0.0, 1.0, -1.0, 1.7, -3.0, 0.99999, -0.99999, 1e-5, 0.5], dtype=np.float32)
    pcm = waveform.to_int16(samples)
    expected = (torch.clamp(torch.from_numpy(samples), min=-1.0, max=1.0) * 32767.0).type(torch.int16).numpy()
    assert pcm.dtype == np.int16 and np.array_equal(pcm, expected)
    assert pcm.tolist()[:5] == [0, 32767, -32767, 32767, -32767] and pcm[7] == 0
    back = waveform.from_int16(pcm)
    assert back.dtype == np.float32 and np.array_equal(back, (pcm / 32767.0).astype(np.float32))
    assert np.array_equal(waveform.to_int16(noise(1)), (noise(1) * np.float32(32767)).astype(np.int16))


def test_a_crop_is_the_part_asked_for():
    assert waveform.crop(np.arange(9), 2, 3).tolist() == [2, 3, 4]
