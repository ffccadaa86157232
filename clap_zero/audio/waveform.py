"""Operations on waveforms: mix-down, resampling, 16-bit round trip, cropping."""

from __future__ import annotations

import functools
import math
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from torchaudio.transforms import Resample

INT16_SCALE = 32767.0
"""Full scale of the 16-bit round trip (LAION: both ways the same number, so that 1.0 comes back as 1.0)."""

MAX_KERNEL_SIZE = 1_000_000
"""Most numbers that one resampling kernel may have (4 MB as float32)."""


def mix_down(samples: np.ndarray) -> np.ndarray:
    """Mixes to mono: the mean over channels, whatever the channels are (the one rule of this package).

    Args:
        samples: (n,) mono, or (n, channels) as decoders give it.

    Returns:
        float32 (n,). Opposite channels cancel to silence; a sound in one of c channels comes out at 1/c.
    """
    assert samples.ndim in (1, 2), samples.shape
    if samples.ndim == 1:
        return np.ascontiguousarray(samples, dtype=np.float32)
    if samples.shape[1] == 1:
        return np.ascontiguousarray(samples[:, 0], dtype=np.float32)
    # Infinities of both signs have no mean, and huge float64 samples are infinite in float32: the caller refuses both.
    with np.errstate(invalid="ignore", over="ignore"):
        return samples.mean(axis=1, dtype=np.float64).astype(np.float32)


def _ratio(from_hz: int, to_hz: int) -> tuple[int, int]:
    """The ratio from_hz : to_hz in lowest terms, or a near one where the exact kernel would be huge.

    A windowed-sinc kernel holds about `up * (down + filter width)` numbers. 44,099 to 48,000 Hz would be 2e9 of them,
    so ratios with large terms are replaced by the nearest one with small terms. The relative error of the rate is
    below 3e-5 (2 ms in a minute); the usual rates are all exact.
    """
    exact = Fraction(from_hz, to_hz)
    if exact.numerator * exact.denominator <= MAX_KERNEL_SIZE:
        return exact.numerator, exact.denominator
    near = exact.limit_denominator(max(1, math.isqrt(int(MAX_KERNEL_SIZE / exact))))
    return near.numerator, near.denominator


@functools.lru_cache(maxsize=16)
def _resampler(from_terms: int, to_terms: int) -> Resample:
    # Imported here: most shards are 48 kHz already, and loader workers start faster without torchaudio.
    from torchaudio.transforms import Resample

    return Resample(from_terms, to_terms)


def resample(samples: np.ndarray, from_hz: int, to_hz: int) -> np.ndarray:
    """Resamples with torchaudio's windowed sinc (Hann, 6 zero crossings, roll-off 0.99); kernels are cached.

    Args:
        samples: float32 (n,).
        from_hz: Rate of `samples`.
        to_hz: Rate wanted.

    Returns:
        float32 (ceil(n * to_hz / from_hz),).
    """
    assert samples.ndim == 1 and samples.size > 0 and from_hz > 0 and to_hz > 0
    if from_hz == to_hz:
        return np.ascontiguousarray(samples, dtype=np.float32)
    num_wanted = -(-samples.size * to_hz // from_hz)
    kernel = _resampler(*_ratio(from_hz, to_hz))
    with torch.no_grad():
        out = kernel(torch.from_numpy(np.ascontiguousarray(samples, dtype=np.float32))[None])[0].numpy()
    # Only where the ratio is a near one can the lengths differ, by a few samples.
    return out[:num_wanted] if out.size >= num_wanted else np.pad(out, (0, num_wanted - out.size))


def to_int16(samples: np.ndarray) -> np.ndarray:
    """float -> int16 as LAION's training data was made: clamp to [-1, 1], times 32767, truncated towards zero.

    Source: `float32_to_int16` in LAION-AI/CLAP, laion_clap/training/data.py.
    """
    return (np.clip(samples, -1.0, 1.0) * np.float32(INT16_SCALE)).astype(np.int16)


def from_int16(samples: np.ndarray) -> np.ndarray:
    """int16 -> float32: divided by 32767.

    Source: `int16_to_float32` in LAION-AI/CLAP, laion_clap/training/data.py.
    """
    return samples.astype(np.float32) / np.float32(INT16_SCALE)


def crop(samples: np.ndarray, start_sample: int, num_samples: int) -> np.ndarray:
    """The part [start_sample, start_sample + num_samples), which must lie inside; a view, no copy."""
    assert start_sample >= 0 and start_sample + num_samples <= samples.size, (start_sample, num_samples, samples.size)
    return samples[start_sample : start_sample + num_samples]
