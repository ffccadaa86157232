"""Inputs of the audio tests: encoded bytes, and real clips of given lengths."""

from __future__ import annotations

import functools
import io
from pathlib import Path

import numpy as np
import soundfile

from clap_zero.audio.decode import load_clip
from clap_zero.audio.waveform import resample

REAL_SOUNDS = Path(__file__).parents[3] / "examples" / "sounds"


def encode(samples: np.ndarray, kind: str, *, subtype: str | None = None, rate_hz: int = 48_000, **options) -> bytes:
    """An audio file in memory: samples (n,) or (n, channels)."""
    file = io.BytesIO()
    soundfile.write(file, samples, rate_hz, format=kind, subtype=subtype, **options)
    return file.getvalue()


def noise(seconds: float, *, rate_hz: int = 48_000, seed: int = 0) -> np.ndarray:
    """White noise, float32 (n,)."""
    return (np.random.default_rng(seed).standard_normal(round(seconds * rate_hz)) * 0.1).astype(np.float32)


def tone(seconds: float, *, hz: float = 1000.0, peak: float = 0.5, rate_hz: int = 48_000) -> np.ndarray:
    """A sine, float32 (n,)."""
    return (peak * np.sin(2 * np.pi * hz * np.arange(round(seconds * rate_hz)) / rate_hz)).astype(np.float32)


def real_clips(lengths: tuple[int, ...]) -> list[np.ndarray]:
    """Real recordings, joined and cut to the lengths wanted at 48 kHz; every other one as if it were of 44.1 kHz."""
    files = sorted(REAL_SOUNDS.glob("*.ogg"))
    clips, at = [], 0
    for length in lengths:
        parts: list[np.ndarray] = []
        while sum(part.size for part in parts) < length:
            part = _load(files[at * 37 % len(files)])
            parts.append(resample(part, 44_100, 48_000) if at % 2 else part)
            at += 1
        clips.append(np.concatenate(parts)[:length])
    return clips


@functools.cache
def _load(path: Path) -> np.ndarray:
    return load_clip(path.read_bytes(), max_seconds=60)
