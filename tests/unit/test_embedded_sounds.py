"""The embedded sounds are complete, licensed, real, and split so that nothing held out is trained on."""

from __future__ import annotations

import csv
import hashlib
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import soundfile

SOUNDS = Path(__file__).resolve().parents[2] / "examples" / "sounds"
CAPTIONS = ("caption", "caption_2", "caption_3")
NOTE_NAMES = ("C", "C#", "D", "D#", "E", "F", "F#", "G", "G#", "A", "A#", "B")
# Autocorrelation cannot tell their notes: bars ring inharmonically, the organs' registration adds a fifth below.
AMBIGUOUS = ("glockenspiel", "xylophone", "Hammond organ", "rock organ")


@pytest.fixture(scope="module")
def rows() -> list[dict[str, str]]:
    with (SOUNDS / "manifest.csv").open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


@pytest.fixture(scope="module")
def waveforms(rows: list[dict[str, str]]) -> dict[str, np.ndarray]:
    decoded = {}
    for row in rows:
        samples, rate_hz = soundfile.read(SOUNDS / row["file"], dtype="float32")
        assert rate_hz == 48000 and samples.ndim == 1, row["file"]
        decoded[row["file"]] = samples
    return decoded


def of_split(rows: list[dict[str, str]], split: str) -> list[dict[str, str]]:
    return [row for row in rows if row["split"] == split]


def test_manifest_lists_every_file_once(rows):
    assert Counter(row["file"] for row in rows) == Counter(path.name for path in SOUNDS.glob("*.ogg"))
    assert {path.suffix for path in SOUNDS.iterdir()} == {".ogg", ".csv", ".md"}
    assert sum(path.stat().st_size for path in SOUNDS.iterdir()) < 10_000_000


def test_licence_and_attribution_of_each(rows):
    assert {row["license"] for row in rows} <= {"MIT", "CC-BY-SA-3.0", "CC0-1.0"}
    assert all(row["attribution"].strip() and row["title"].strip() and row["source"].strip() for row in rows)
    licences = (SOUNDS / "LICENCES.md").read_text(encoding="utf-8")
    assert all(name in licences for name in {row["license"] for row in rows})
    assert "The above copyright notice and this permission notice shall be" in licences  # MIT asks for its text


def test_held_out_pairs_share_nothing_with_training(rows, waveforms):
    train, test = of_split(rows, "train"), of_split(rows, "test")
    assert len(train) + len(test) == len(rows) and len(test) >= 96
    assert not {row["source"] for row in train} & {row["source"] for row in test}
    assert len({row["source"] for row in rows}) == len(rows)
    assert len({hashlib.sha256(samples.tobytes()).hexdigest() for samples in waveforms.values()}) == len(rows)


def test_held_out_kinds_occur_several_times_in_training(rows):
    num_train = Counter(row["label"] for row in of_split(rows, "train"))
    assert all(num_train[row["label"]] >= 3 for row in of_split(rows, "test"))


def test_captions_are_there_and_tell_held_out_pairs_apart(rows):
    assert all(row["caption"].strip() for row in rows)
    assert all(row[column] == row[column].strip() for row in rows for column in CAPTIONS)
    for column in CAPTIONS:
        captions = [row[column] for row in of_split(rows, "test") if row[column]]
        assert len(set(captions)) == len(captions), column


def test_clips_are_short_and_neither_silent_nor_clipped(waveforms):
    for name, samples in waveforms.items():
        assert 1.0 <= len(samples) / 48000 <= 4.0, name
        assert np.isfinite(samples).all() and 0.3 < np.abs(samples).max() < 1.0, name
        assert np.sqrt(np.mean(samples**2)) > 0.005, name


def sounding_offset(samples: np.ndarray, midi_key: int) -> int:
    """Semitones from the named note to the one of the octave around it whose period the waveform repeats best."""
    part = samples[2400:24000].astype(np.float64)
    num_fft = 1 << (2 * len(part)).bit_length()
    correlation = np.fft.irfft(np.abs(np.fft.rfft(part - part.mean(), num_fft)) ** 2, num_fft)[: len(part)]
    correlation /= np.arange(len(part), 0, -1)  # unbiased: otherwise short periods win

    def repeats(offset: int) -> float:
        lags = 48000 / (440 * 2 ** ((midi_key + offset + np.array([0.5, -0.5]) - 69) / 12))
        return correlation[int(np.ceil(lags[0])) : int(lags[1]) + 1].max(initial=-np.inf)

    return max(range(-6, 6), key=repeats)


def test_named_note_is_the_one_that_sounds(rows, waveforms):
    offsets = []
    for row in rows:
        note = re.search(r"the note ([A-G]#?)(\d)$", row["caption"])
        if note and row["label"] not in AMBIGUOUS:
            key = NOTE_NAMES.index(note[1]) + 12 * (int(note[2]) + 1)
            if key <= 84:  # above, a semitone is less than two samples wide
                offsets.append((sounding_offset(waveforms[row["file"]], key), row["file"]))
    wrong = [name for offset, name in offsets if offset != 0]
    assert len(offsets) > 300 and not wrong, wrong
