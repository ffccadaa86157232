"""The data of `loader.py`: 10 s clips at 48 kHz, mono, 16 bit, made of real recordings, in LAION's layout."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import soundfile

from clap_zero.audio.clips import FeatureConfig
from clap_zero.audio.decode import load_clip
from clap_zero.audio.features import ClapFeatures
from clap_zero.audio.logmel import encode_logmel
from clap_zero.audio.waveform import to_int16

RATE_HZ = 48_000
CLIP_SAMPLES = 10 * RATE_HZ
SHARD_CLIPS = 64
_SUFFIXES = (".ogg", ".wav", ".flac", ".mp3")


def make_data(root: Path, sounds: Path, *, num_clips: int, seed: int = 0) -> tuple[Path, Path]:
    """Writes the same clips twice: as FLAC, and as stored log-mels (rand_trunc). Reuses what lies there.

    Args:
        root: gets `flac/train` and `logmel/train`, tars with `sizes.json`.
        sounds: directory of recordings; several are joined until 10 s are full.
        num_clips: clips in each.
        seed: of the choice of recordings.

    Returns:
        The two split directories.
    """
    splits = root / "flac" / "train", root / "logmel" / "train"
    stamp = json.dumps({"sounds": str(sounds.resolve()), "num_clips": num_clips, "seed": seed})
    if (root / "made_of.json").is_file() and (root / "made_of.json").read_text() == stamp:
        return splits
    features = ClapFeatures(FeatureConfig(truncation="rand_trunc"), device="cpu")
    for split in splits:
        split.mkdir(parents=True, exist_ok=True)
    clips = enumerate(_clips(sounds, num_clips, seed))
    sizes: dict[str, int] = {}
    for first in range(0, num_clips, SHARD_CLIPS):
        name = f"{first // SHARD_CLIPS}.tar"
        sizes[name] = min(SHARD_CLIPS, num_clips - first)
        with tarfile.open(splits[0] / name, "w") as flac, tarfile.open(splits[1] / name, "w") as logmel:
            for number, (samples, titles) in islice(clips, sizes[name]):
                text = json.dumps({"text": _captions(titles), "tag": titles}).encode()
                _add(flac, f"{number:06d}.flac", _flac(samples))
                _add(logmel, f"{number:06d}.logmel", encode_logmel(samples, features))
                for tar in (flac, logmel):
                    _add(tar, f"{number:06d}.json", text)
    for split in splits:
        (split / "sizes.json").write_text(json.dumps(sizes))
    (root / "made_of.json").write_text(stamp)
    return splits


def _clips(sounds: Path, num_clips: int, seed: int) -> Iterator[tuple[np.ndarray, list[str]]]:
    """Clips int16 (480000,) and the names of the recordings in each; every recording is used about equally often."""
    rng = np.random.default_rng(seed)
    files = sorted(path for path in sounds.iterdir() if path.suffix in _SUFFIXES)
    if not files:
        raise SystemExit(f"{sounds} holds no recordings ({', '.join(_SUFFIXES)})")
    waiting: list[Path] = []
    for _ in range(num_clips):
        parts: list[np.ndarray] = []
        titles = []
        while sum(part.size for part in parts) < CLIP_SAMPLES:
            if not waiting:
                waiting = [files[i] for i in rng.permutation(len(files))]
            path = waiting.pop()
            parts.append(load_clip(path.read_bytes(), max_seconds=10.0))
            titles.append(path.stem.replace("_", " "))
        yield to_int16(np.concatenate(parts)[:CLIP_SAMPLES]), titles


def _captions(titles: list[str]) -> list[str]:
    """Five captions of the usual lengths, 5 to 30 words."""
    listed = " and ".join(dict.fromkeys(titles[:3]))
    return [
        f"The sound of {listed}.",
        f"{listed} can be heard in a short recording.",
        f"A recording in which {listed} follow each other while faint noise goes on in the background.",
        f"Somebody recorded {listed} outdoors.",
        f"{listed}, ten seconds long, recorded with one microphone at some distance and without any speech or music.",
    ]


def _flac(samples: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, RATE_HZ, format="FLAC", subtype="PCM_16")
    return buffer.getvalue()


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


def encoded_clips(split: Path, suffix: str) -> list[bytes]:
    """The audio members of a split, as bytes."""
    found = []
    for path in sorted(split.glob("*.tar")):
        with tarfile.open(path) as tar:
            found += [tar.extractfile(member).read() for member in tar if member.name.endswith(suffix)]  # type: ignore[union-attr]
    return found
