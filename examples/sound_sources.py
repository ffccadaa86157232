"""Readers for the four Debian packages that the embedded sounds come from.

Each reader returns recordings as they lie in the package: one channel, the original sampling rate, the original name.
"""

from __future__ import annotations

import io
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile

_SAMPLE, _ROOT_KEY, _COARSE_TUNE, _FINE_TUNE = 53, 58, 51, 52  # generator numbers, SoundFont 2.01, section 8.1.2


@dataclass(frozen=True)
class Recording:
    """One recording of a package.

    Attributes:
        samples: Mono waveform (n,) float32.
        rate_hz: Its sampling rate.
        title: Name that the package gives it.
        attribution: Who made it.
        midi_key: MIDI number of the note that sounds (fractional), None where the source names no note.
    """

    samples: np.ndarray
    rate_hz: int
    title: str
    attribution: str
    midi_key: float | None = None


def decode(data: bytes | Path) -> tuple[np.ndarray, int]:
    """Decodes audio; of a stereo pair only the left channel is kept, because a sum can cancel.

    Returns:
        Waveform (n,) float32 and its rate in Hz.
    """
    stream = io.BytesIO(data) if isinstance(data, bytes) else data
    samples, rate_hz = soundfile.read(stream, dtype="float32", always_2d=True)
    return samples[:, 0], rate_hz


class SoundFont:
    """An .sf3 file: a SoundFont 2 whose samples are Ogg Vorbis streams. Only what the notes need is read."""

    attribution = (
        "Fluid (R3) Mono GM: (c) 2014-2017 Michael Cowgill; Temple Blocks (c) 2002 Ethan Winer; Drumline Percussion "
        "(c) 2016 Michael Schorsch; original stereo version (c) 2000-2002, 2008 Frank Wen"
    )

    def __init__(self, path: Path) -> None:
        self._data = path.read_bytes()
        self._chunks = {
            (self._data[start : start + 4] + name): (at, size)
            for _, start, list_size in self._walk(12, len(self._data))
            for name, at, size in self._walk(start + 4, start + list_size)
        }
        self._headers = self._records("shdr", "<20sIIIIIBbHH")
        self.sample_numbers = {self._text(h[0]): number for number, h in enumerate(self._headers[:-1])}

    def instrument(self, name: str) -> dict[str, float]:
        """Maps each sample of an instrument to the MIDI key (fractional) at which it sounds as recorded.

        The root key of most sample headers is a filler (60); what counts is the zone's overriding root key and tuning.
        A zone plays the sample at key = root - coarse - fine/100 - correction/100 without any shift of pitch.
        """
        instruments = self._records("inst", "<20sH")
        bags, gens = self._records("ibag", "<HH"), self._records("igen", "<HH")
        number = next(i for i, record in enumerate(instruments[:-1]) if self._text(record[0]) == name)
        shared: dict[int, int] = {}
        keys: dict[str, float] = {}
        for bag in range(instruments[number][1], instruments[number + 1][1]):
            zone = dict(gens[bags[bag][0] : bags[bag + 1][0]])
            if _SAMPLE not in zone:
                shared = zone  # the global zone gives defaults to the others
                continue
            zone = shared | zone
            header = self._headers[zone[_SAMPLE]]
            tune = self._signed(zone.get(_COARSE_TUNE, 0)) + self._signed(zone.get(_FINE_TUNE, 0)) / 100
            keys.setdefault(self._text(header[0]), zone.get(_ROOT_KEY, header[6]) - tune - header[7] / 100)
        return keys

    def recording(self, sample: str, midi_key: float | None = None) -> Recording:
        """Decodes one sample, complete and without its loop."""
        _, start, end, *_ = self._headers[self.sample_numbers[sample]]
        base = self._chunks[b"sdtasmpl"][0]
        samples, rate_hz = decode(self._data[base + start : base + end])
        return Recording(samples, rate_hz, sample, self.attribution, midi_key)

    def _walk(self, start: int, end: int) -> Iterator[tuple[bytes, int, int]]:
        """RIFF chunks as (name, offset of the content, size); this file does not pad odd sizes."""
        while start + 8 <= end:
            size = struct.unpack_from("<I", self._data, start + 4)[0]
            yield self._data[start : start + 4], start + 8, size
            start += 8 + size

    def _records(self, name: str, layout: str) -> list[tuple]:
        at, size = self._chunks[b"pdta" + name.encode()]
        return list(struct.iter_unpack(layout, self._data[at : at + size]))

    @staticmethod
    def _text(raw: bytes) -> str:
        return raw.split(b"\0")[0].decode("latin-1")

    @staticmethod
    def _signed(amount: int) -> int:
        return amount - 65536 if amount > 32767 else amount


def read_opensfx(path: Path) -> dict[str, Recording]:
    """Reads opensfx.cat: pairs (offset, size) of u32, each pointing at a length byte, the title, and a RIFF wave."""
    data = path.read_bytes()
    num_clips = (struct.unpack_from("<I", data)[0] & 0x7FFFFFFF) // 8
    recordings = {}
    for number in range(num_clips):
        offset, size = struct.unpack_from("<II", data, 8 * number)
        offset &= 0x7FFFFFFF
        title = data[offset + 1 : offset + 1 + data[offset]].rstrip(b"\0").decode("latin-1")
        if title.startswith('"Unused'):
            continue  # empty place holders
        start = data.index(b"RIFF", offset)
        samples, rate_hz = decode(data[start : start + size])
        recordings[str(number)] = Recording(samples, rate_hz, title.split('"')[1], f"OpenSFX 1.0.3. {title}")
    return recordings


def read_scratch(root: Path) -> dict[str, Recording]:
    """Reads the sound library of Scratch 1.4; keys such as "Human/Sneeze-female"."""
    attribution = "Scratch 1.4 media library, (c) 2011 Massachusetts Institute of Technology"
    recordings = {}
    for path in sorted(root.rglob("Sounds/*/*")):
        if path.suffix in (".wav", ".mp3"):
            title = f"{path.parent.name}/{path.stem}"
            recordings[title] = Recording(*decode(path), title, attribution)
    return recordings


def read_sonic_pi(root: Path) -> dict[str, Recording]:
    """Reads the samples of Sonic Pi; the authors stand in the links of its README."""
    readme = next(root.rglob("samples/README.md"))
    links = re.findall(r"`:(\w+)`\s*-\s*\S+/people/([^/]+)/sounds/(\d+)", readme.read_text(encoding="utf-8"))
    credits = {
        name.replace("_", ""): f"{author.replace('%20', ' ')} (freesound {number}), via Sonic Pi"
        for name, author, number in links
    }
    recordings = {}
    for path in sorted(readme.parent.glob("*.flac")):
        credit = credits.get(path.stem.replace("_", ""))
        if credit is not None:
            recordings[path.stem] = Recording(*decode(path), path.stem, credit)
    return recordings
