"""Bytes of an audio file -> int16 waveform, as loader workers send it: straight from the decoder where that is exact.

Most shards hold 16-bit mono at the model's rate. libsndfile gives their samples as they are stored, and LAION's round
trip over float (`to_int16` of v / 32768) is then one subtraction: v - sign(v). Everything else goes over float32.
"""

from __future__ import annotations

import time

import numpy as np
import soundfile

from clap_zero.audio.decode import UNKNOWN_FRAMES, decode
from clap_zero.audio.headers import corrected
from clap_zero.audio.in_memory import open_sound
from clap_zero.audio.kinds import find_kind
from clap_zero.audio.sound import Part
from clap_zero.audio.waveform import resample, to_int16

_STRAIGHT_KINDS = ("FLAC", "WAV")
_BLOCK_SAMPLES = 65_536
"""Samples of one subtraction: its temporaries stay in the cache."""


def load_pcm(
    data: bytes,
    *,
    max_seconds: float,
    sample_rate_hz: int = 48_000,
    rng: np.random.Generator | None = None,
    notes: list[str] | None = None,
    seconds: dict[str, float] | None = None,
    buffer: np.ndarray | None = None,
) -> np.ndarray:
    """`to_int16(load_clip(...))`, bit for bit, with fewer copies.

    Args:
        data: The whole file.
        max_seconds: Longest part that is decoded.
        sample_rate_hz: Rate wanted.
        rng: Draws the part of a longer file.
        notes: Gets a line where the file is damaged and its readable part is used.
        seconds: The time that was spent is added to its "decode" and "resample".
        buffer: int16 (m,): memory that the result may be in, where it fits and goes no way over float.

    Returns:
        int16 (n,), full scale 32767, 1 <= n <= max_seconds * sample_rate_hz.

    Raises:
        AudioError: The clip cannot be used; the reason is one line.
    """
    started = time.perf_counter()
    before = None if rng is None else rng.bit_generator.state
    samples = _straight(data, Part(0.0, max_seconds, rng), sample_rate_hz, buffer) if data else None
    if samples is None:
        if rng is not None and before is not None:
            rng.bit_generator.state = before  # the other way begins from the same place
        audio = decode(data, max_seconds=max_seconds, rng=rng)
        if audio.note is not None and notes is not None:
            notes.append(audio.note)
        resampling = time.perf_counter()
        wave = resample(audio.samples, audio.sample_rate_hz, sample_rate_hz)
        if seconds is not None:
            resampled = time.perf_counter()
            seconds["resample"] = seconds.get("resample", 0.0) + resampled - resampling
            started += resampled - resampling
        samples = to_int16(wave[: max(1, round(max_seconds * sample_rate_hz))])
    if seconds is not None:
        seconds["decode"] = seconds.get("decode", 0.0) + time.perf_counter() - started
    return samples


def _straight(data: bytes, part: Part, sample_rate_hz: int, buffer: np.ndarray | None) -> np.ndarray | None:
    """The part of an undamaged 16-bit mono file at the rate wanted; None for every other file, which goes over float.

    A header that claims more than there is costs address space only: pages are touched as the decoder fills them.
    """
    kind = find_kind(data)
    if kind not in _STRAIGHT_KINDS or corrected(data, kind) is not None:
        return None
    try:
        with open_sound(data) as file:
            if file.channels != 1 or file.samplerate != sample_rate_hz or file.subtype != "PCM_16":
                return None
            if not 0 < file.frames < UNKNOWN_FRAMES:
                return None
            start, wanted = part.place(file.frames, sample_rate_hz)
            fits = buffer is not None and wanted <= buffer.size
            samples = buffer[:wanted] if buffer is not None and fits else np.empty(wanted, dtype=np.int16)
            if start:
                file.seek(start)
            if file.read(out=samples).shape[0] < wanted:
                return None
    except soundfile.LibsndfileError:
        return None
    for first in range(0, wanted, _BLOCK_SAMPLES):
        block = samples[first : first + _BLOCK_SAMPLES]
        np.subtract(block, np.sign(block), out=block)
    return samples
