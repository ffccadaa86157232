"""Makes examples/sounds: short real recordings with captions, from four Debian packages.

    python examples/make_sounds.py [--packages DIR] [--out examples/sounds]

The packages are free, small (76 MB together) and need no root: they are fetched with `apt-get download` and
unpacked with `dpkg-deb -x`. On a machine without apt, unpack them yourself, each into DIR/<package name>, and name
DIR with --packages.

Of each recording the 4 s with the most energy are kept (of notes the first 2.5 s), silence at both ends is cut, the
ends are faded, the peak is set to 0.6, clips shorter than 1 s are followed by silence up to 1 s, and the result is
written as Ogg Opus, 48 kHz, mono. Nothing is looped, shifted, mixed or synthesised. Which note a recording is comes
from the soundfont's own key map; what is said about the other recordings stands in sounds_catalog.csv, written by hand.
"""

from __future__ import annotations

import argparse
import csv
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile
import torch
import torchaudio
from sound_similarity import similar_notes
from sound_sources import Recording, SoundFont, read_opensfx, read_scratch, read_sonic_pi
from sounds_catalog import INSTRUMENTS, Instrument

RATE_HZ = 48000
PEAK = 0.6  # room for the overshoot of the codec on short clicks
MAX_NOTE_S, MAX_CLIP_S, MIN_CLIP_S = 2.5, 4.0, 1.0
MIN_NOTE_S = 0.2  # shorter ones are little more than one period to be looped: no longer a recording of a note
MAX_NOTES = 10  # of one instrument, so that no kind of sound dominates
OPUS_COMPRESSION = 0.84  # libsndfile's scale, 0 largest file to 1 smallest; about 50 kbit/s
PACKAGES = ("fluidr3mono-gm-soundfont", "openttd-opensfx", "scratch", "sonic-pi-samples")
SHORT_NAMES = dict(zip(PACKAGES, ("fluidr3", "opensfx", "scratch", "sonic-pi"), strict=True))
LICENSES = dict(zip(PACKAGES, ("MIT", "CC-BY-SA-3.0", "CC-BY-SA-3.0", "CC0-1.0"), strict=True))
COLUMNS = ("file", "caption", "caption_2", "caption_3", "split", "label", "title", "source", "license", "attribution")
NOTE_NAMES = ("C", "C#", "D", "D#", "E", "F", "F#", "G", "G#", "A", "A#", "B")


@dataclass(frozen=True)
class Clip:
    """A recording with all that is said about it."""

    recording: Recording
    name: str
    captions: tuple[str, ...]
    split: str
    label: str
    package: str
    max_s: float


def note_name(midi_key: float) -> str:
    """Scientific pitch notation: MIDI key 60 is C4."""
    key = round(midi_key)
    return f"{NOTE_NAMES[key % 12]}{key // 12 - 1}"


def register_name(midi_key: float) -> str:
    """Below C3 low, from C5 on high, whatever the instrument."""
    return "low" if round(midi_key) < 48 else "high" if round(midi_key) >= 72 else "middle"


def held_out(notes: list[str], similar: set[str], *, num_test: int) -> set[str]:
    """The test notes of an instrument, whose notes are given by pitch: spread, never the lowest or the highest.

    A note that sounds like another one played at another speed is never held out.
    """
    inner = [i for i in range(1, len(notes) - 1) if notes[i] not in similar]
    test: set[str] = set()
    for wanted in range(1, num_test + 1):
        position = min(inner, key=lambda i: abs(i - wanted * (len(notes) - 1) / (num_test + 1)), default=None)
        if position is not None:
            test.add(notes[position])
            inner.remove(position)
    return test


def note_clips(font: SoundFont, instrument: Instrument) -> Iterator[Clip]:
    """The notes of one instrument, at most one recording a note (so one velocity layer, one channel)."""
    notes: dict[str, Recording] = {}
    for sample, key in sorted(font.instrument(instrument.font_name).items(), key=lambda item: item[1]):
        if sample == "Extension" or not sample.startswith(instrument.prefix):
            continue  # "Extension" is one sample that tops up every guitar
        recording = font.recording(sample, key)
        if len(recording.samples) >= MIN_NOTE_S * recording.rate_hz:
            notes.setdefault(note_name(key), recording)
    kept = list(notes.items())
    if len(kept) > MAX_NOTES:
        kept = [kept[i] for i in np.linspace(0, len(kept) - 1, MAX_NOTES).round().astype(int)]
    num_test = sum(len(notes) >= enough for enough in (5, 7, 12))
    test = held_out([note for note, _ in kept], similar_notes(dict(kept)), num_test=num_test)
    for note, recording in kept:
        captions = instrument.captions(note, register_name(recording.midi_key))
        split = "test" if note in test else "train"
        yield Clip(recording, note.replace("#", "s"), captions, split, instrument.label, PACKAGES[0], MAX_NOTE_S)


def listed_clips(catalog: Path, recordings: dict[str, dict[str, Recording]]) -> Iterator[Clip]:
    """The recordings that sounds_catalog.csv names, out of all recordings by package and key."""
    with catalog.open(newline="", encoding="utf-8") as stream:
        for row in csv.DictReader(stream):
            recording = recordings[row["package"]][row["key"]]
            captions = tuple(filter(None, (row["caption"], row["caption_2"], row["caption_3"])))
            name = f"{SHORT_NAMES[row['package']]}-{recording.title}"
            yield Clip(recording, name, captions, row["split"], row["label"], row["package"], MAX_CLIP_S)


def collect(packages: Path) -> Iterator[Clip]:
    """All clips, notes first."""
    font = SoundFont(next(packages.rglob("*.sf3")))
    for instrument in INSTRUMENTS:
        yield from note_clips(font, instrument)
    readers = (
        {name: font.recording(name) for name in font.sample_numbers},
        read_opensfx(next(packages.rglob("opensfx.cat"))),
        read_scratch(packages / "scratch"),
        read_sonic_pi(packages / "sonic-pi-samples"),
    )
    yield from listed_clips(Path(__file__).with_name("sounds_catalog.csv"), dict(zip(PACKAGES, readers, strict=True)))


def prepare(recording: Recording, *, max_s: float) -> np.ndarray:
    """Cuts, fades, resamples to 48 kHz and levels a recording.

    Returns:
        Waveform (n,) float32 of 1 s to max_s.
    """
    rate, samples = recording.rate_hz, recording.samples - recording.samples.mean()
    loud = np.flatnonzero(np.abs(samples) > 1e-3 * np.abs(samples).max())  # 60 dB below the peak
    samples = samples[max(0, loud[0] - rate // 200) : loud[-1] + 1]
    length = int(max_s * rate)
    if len(samples) > length:
        start = 0
        if recording.midi_key is None:
            energy = np.cumsum(np.concatenate([[0.0], samples.astype(np.float64) ** 2]))
            start = int(np.argmax(energy[length:] - energy[:-length]))
        samples = samples[start : start + length].copy()
        _fade(samples, start_s=0.005 if start else 0.0, end_s=0.1, rate_hz=rate)
    else:
        _fade(samples, start_s=0.0, end_s=min(0.02, 0.1 * len(samples) / rate), rate_hz=rate)
    samples = torchaudio.functional.resample(torch.from_numpy(samples), rate, RATE_HZ).numpy()
    samples *= PEAK / np.abs(samples).max()
    return np.pad(samples, (0, max(0, int(MIN_CLIP_S * RATE_HZ) - len(samples))))


def _fade(samples: np.ndarray, *, start_s: float, end_s: float, rate_hz: int) -> None:
    """Linear fades in place, so that a cut makes no click."""
    num_start, num_end = int(start_s * rate_hz), int(end_s * rate_hz)
    samples[:num_start] *= np.linspace(0, 1, num_start, endpoint=False, dtype=np.float32)
    samples[len(samples) - num_end :] *= np.linspace(1, 0, num_end, dtype=np.float32)


def slug(text: str) -> str:
    """A file name: lower case, digits and hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def write(clips: Iterator[Clip], out: Path) -> list[dict[str, str]]:
    """Writes the audio files and manifest.csv; old audio files in `out` go."""
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("*.ogg"):
        old.unlink()
    rows = []
    for clip in clips:
        path = out / f"{slug(clip.label)}_{slug(clip.name)}.ogg"
        if path.exists():
            raise SystemExit(f"Two clips would be called {path.name}: make their labels in sounds_catalog differ.")
        waveform = prepare(clip.recording, max_s=clip.max_s)
        soundfile.write(path, waveform, RATE_HZ, format="OGG", subtype="OPUS", compression_level=OPUS_COMPRESSION)
        captions = (*clip.captions, "", "")[:3]
        recording_name = re.sub(r"[(][LR]?[)]?$", "", clip.recording.title).strip()  # both channels are one source
        values = (path.name, *captions, clip.split, clip.label, clip.recording.title)
        values += (f"{clip.package}/{recording_name}", LICENSES[clip.package], clip.recording.attribution)
        rows.append(dict(zip(COLUMNS, values, strict=True)))
    with (out / "manifest.csv").open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return rows


def fetch_packages(into: Path) -> None:
    """Downloads and unpacks the Debian packages without installing them."""
    for package in PACKAGES:
        subprocess.run(["apt-get", "download", package], cwd=into, check=True)
        subprocess.run(["dpkg-deb", "-x", next(into.glob(f"{package}_*.deb")), into / package], check=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Make examples/sounds from four Debian packages.")
    parser.add_argument("--packages", type=Path, help="directory with the unpacked packages (default: fetch them)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "sounds", help="default: %(default)s")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        if arguments.packages is None:
            fetch_packages(Path(scratch))
        rows = write(collect(arguments.packages or Path(scratch)), arguments.out)
    size_bytes = sum(path.stat().st_size for path in arguments.out.iterdir())
    num_test = sum(row["split"] == "test" for row in rows)
    num_kinds = len({row["label"] for row in rows})
    print(f"{len(rows)} clips ({num_test} held out) of {num_kinds} kinds, {size_bytes / 1e6:.2f} MB: {arguments.out}")


if __name__ == "__main__":
    main()
