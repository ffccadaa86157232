"""Makes small shards for the tests of the data package."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import soundfile


def audio_bytes(seed: int, *, seconds: float = 0.05, rate_hz: int = 48_000, kind: str = "FLAC") -> bytes:
    """A short noise, different for each seed."""
    rng = np.random.default_rng(seed)
    samples = rng.uniform(-0.5, 0.5, max(1, int(seconds * rate_hz))).astype(np.float32)
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate_hz, format=kind)
    return buffer.getvalue()


def write_tar(path: Path, members: Iterable[tuple[str, bytes]], form: int = tarfile.USTAR_FORMAT) -> Path:
    """Writes members in the given order, doubled names too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=form) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def pair(key: str, seed: int, text: object = None, **audio) -> list[tuple[str, bytes]]:
    """The two members of a sample."""
    captions = [f"caption of {key}"] if text is None else text
    return [(f"{key}.flac", audio_bytes(seed, **audio)), (f"{key}.json", json.dumps({"text": captions}).encode())]


def write_split(directory: Path, sizes: list[int], *, declare: bool = True, **audio) -> Path:
    """A split with one tar for each size; keys are unique over the split. The sample `k` has the seed `k`."""
    directory.mkdir(parents=True, exist_ok=True)
    number = 0
    for shard, size in enumerate(sizes):
        members = []
        for _ in range(size):
            members += pair(f"s{number:04d}", number, **audio)
            number += 1
        write_tar(directory / f"{shard}.tar", members)
    if declare:
        counts = {f"{shard}.tar": size for shard, size in enumerate(sizes)}
        (directory / "sizes.json").write_text(json.dumps(counts))
    return directory
