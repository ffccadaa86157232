"""Finds notes that are the same recording played at another speed, as makers of soundfonts fill gaps with."""

from __future__ import annotations

import numpy as np
from sound_sources import Recording

SAME_ABOVE = 0.93  # correlation; different strokes of one instrument stay below, unless they are nearly sine waves
COMPARED_S = 0.35  # long enough for attack and timbre, short enough that a detuning of 2 cents does not matter
MAX_SEMITONES = 26


def similar_notes(notes: dict[str, Recording]) -> set[str]:
    """Names of the notes whose waveform, with time stretched to its pitch, equals that of another note.

    Args:
        notes: Recordings of one instrument by name, each with its `midi_key`.
    """
    onsets = {name: _from_onset(recording) for name, recording in notes.items()}
    names = sorted(notes, key=lambda name: notes[name].midi_key)
    similar: set[str] = set()
    for i, low in enumerate(names):
        for high in names[i + 1 :]:
            interval = notes[high].midi_key - notes[low].midi_key
            if interval > MAX_SEMITONES:
                break  # the notes are sorted: the others lie higher still
            pair = (onsets[low], notes[low].rate_hz, onsets[high], notes[high].rate_hz)
            detunings = (-0.04, -0.02, 0.0, 0.02, 0.04)
            if max(_correlation(*pair, interval + detuning) for detuning in detunings) > SAME_ABOVE:
                similar |= {low, high}
    return similar


def _from_onset(recording: Recording) -> np.ndarray:
    samples = recording.samples.astype(np.float64) - recording.samples.mean()
    return samples[int(np.argmax(np.abs(samples) > 0.01 * np.abs(samples).max())) :]


def _correlation(low: np.ndarray, low_hz: int, high: np.ndarray, high_hz: int, semitones: float) -> float:
    """Largest absolute correlation over all lags after `high` is slowed down by an interval."""
    times = np.arange(min(len(low), int(COMPARED_S * low_hz))) * (high_hz / low_hz * 2 ** (-semitones / 12))
    times = times[times < len(high) - 1]
    slowed, low = np.interp(times, np.arange(len(high)), high), low[: len(times)]
    num_fft = 1 << (2 * len(times)).bit_length()
    products = np.fft.irfft(np.fft.rfft(low, num_fft).conj() * np.fft.rfft(slowed, num_fft), num_fft)
    return float(np.abs(products).max() / (np.linalg.norm(low) * np.linalg.norm(slowed) + 1e-12))
