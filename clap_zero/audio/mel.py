"""Mel filter banks of the two kinds that CLAP models were trained with."""

from __future__ import annotations

import numpy as np

_SLANEY_LINEAR_HZ_PER_MEL = 200.0 / 3.0
_SLANEY_KNEE_HZ = 1000.0
_SLANEY_KNEE_MEL = 15.0
_SLANEY_LOG_STEP = np.log(6.4) / 27.0


def _hz_to_mel_htk(hz: np.ndarray) -> np.ndarray:
    return 2595.0 * np.log10(1.0 + hz / 700.0)


def _mel_to_hz_htk(mel: np.ndarray) -> np.ndarray:
    return 700.0 * (10.0 ** (mel / 2595.0) - 1.0)


def _hz_to_mel_slaney(hz: np.ndarray) -> np.ndarray:
    logarithmic = _SLANEY_KNEE_MEL + np.log(np.maximum(hz, 1e-9) / _SLANEY_KNEE_HZ) / _SLANEY_LOG_STEP
    return np.where(hz >= _SLANEY_KNEE_HZ, logarithmic, hz / _SLANEY_LINEAR_HZ_PER_MEL)


def _mel_to_hz_slaney(mel: np.ndarray) -> np.ndarray:
    logarithmic = _SLANEY_KNEE_HZ * np.exp(_SLANEY_LOG_STEP * (mel - _SLANEY_KNEE_MEL))
    return np.where(mel >= _SLANEY_KNEE_MEL, logarithmic, mel * _SLANEY_LINEAR_HZ_PER_MEL)


def mel_filters(
    *, scale: str, n_fft: int, num_mels: int, sample_rate_hz: int, f_min_hz: float, f_max_hz: float
) -> np.ndarray:
    """Triangular filters, linear in Hz, with corners equally spaced on a mel scale.

    Args:
        scale: "slaney" (Slaney's scale, each filter divided by half its width in Hz: librosa's default) or "htk"
            (2595 log10(1 + f/700), peaks of 1: torchaudio's default).
        n_fft: Length of the transform in samples.
        num_mels: Number of filters.
        sample_rate_hz: Sampling rate.
        f_min_hz: Lower corner of the first filter.
        f_max_hz: Upper corner of the last filter.

    Returns:
        Weights for the power spectrum, float64, (n_fft // 2 + 1, num_mels).

    Source: `librosa.filters.mel` and `torchaudio.functional.melscale_fbanks`, as `transformers.audio_utils.
    mel_filter_bank` combines them for ClapFeatureExtractor.
    """
    assert scale in ("slaney", "htk"), scale
    to_mel, to_hz = (_hz_to_mel_slaney, _mel_to_hz_slaney) if scale == "slaney" else (_hz_to_mel_htk, _mel_to_hz_htk)
    low, high = to_mel(np.array([f_min_hz, f_max_hz], dtype=np.float64))
    corners_hz = to_hz(np.linspace(low, high, num_mels + 2))
    bins_hz = np.linspace(0.0, sample_rate_hz // 2, n_fft // 2 + 1)
    widths = np.diff(corners_hz)
    distance = corners_hz[None, :] - bins_hz[:, None]
    rising = -distance[:, :-2] / widths[:-1]
    falling = distance[:, 2:] / widths[1:]
    filters = np.maximum(0.0, np.minimum(rising, falling))
    if scale == "slaney":
        filters *= 2.0 / (corners_hz[2:] - corners_hz[:-2])
    return filters
