"""The sounds that come with the package, as shards."""

from __future__ import annotations

import fcntl
import hashlib
import os
from pathlib import Path

from clap_zero.data.pack import PackOptions, pack
from clap_zero.data.pack_sources import Columns
from clap_zero.errors import DataError

_PACKAGE = Path(__file__).resolve().parents[1]
_PLACES = (_PACKAGE / "assets" / "sounds", _PACKAGE.parent / "examples" / "sounds")
"""In a wheel, in a checkout."""
DEFAULT_DIRECTORY = Path("data") / "embedded_sounds"
_SPLITS = ("train", "test")
_STAMP = "source.sha256"


def sounds_directory() -> Path:
    """Where the audio files and their manifest.csv lie.

    Raises:
        DataError: this installation has none.
    """
    for place in _PLACES:
        if (place / "manifest.csv").is_file():
            return place
    raise DataError(f"the embedded sounds are not installed ({_PLACES[-1]}): name your own with --data.train")


def embedded_sounds(directory: Path | None = None, *, workers: int | None = None) -> tuple[Path, Path]:
    """The shards of the embedded sounds, packed at the first call and reused while the sounds are the same.

    Of several callers one packs and the others wait; killed in between, the next call begins again.

    Args:
        directory: where the splits go; None: ./data/embedded_sounds.
        workers: packing processes; None: the cores of this machine.

    Returns:
        The directories of the splits train and test.

    Raises:
        DataError: the sounds are not installed, or cannot be packed.
    """
    directory = DEFAULT_DIRECTORY if directory is None else directory
    train, test = (directory / split for split in _SPLITS)
    sounds = sounds_directory()
    stamp = _stamp(sounds)
    if not _is_packed(directory, stamp):
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / ".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_packed(directory, stamp):  # another caller may have done it meanwhile
                _pack(sounds, directory, workers)
                written = directory / f".{_STAMP}"
                written.write_text(stamp, "utf-8")
                written.replace(directory / _STAMP)
    return train, test


def _is_packed(directory: Path, stamp: str) -> bool:
    whole = all((directory / split / "sizes.json").is_file() for split in _SPLITS)
    return whole and (directory / _STAMP).is_file() and (directory / _STAMP).read_text("utf-8") == stamp


def _pack(sounds: Path, directory: Path, workers: int | None) -> None:
    report = pack(
        PackOptions(
            out=directory,
            manifest=sounds / "manifest.csv",
            columns=Columns(audio="file", split="split"),
            workers=len(os.sched_getaffinity(0)) if workers is None else workers,
            overwrite=True,
            progress=False,
        )
    )
    missing = [split for split in _SPLITS if split not in report.splits]
    if missing or report.num_rejected:
        raise DataError(f"the embedded sounds in {sounds} are damaged: " + "; ".join(report.lines()))


def _stamp(sounds: Path) -> str:
    """Changes with the manifest and with the names and sizes of the files."""
    digest = hashlib.sha256((sounds / "manifest.csv").read_bytes())
    for path in sorted(sounds.iterdir()):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
    return digest.hexdigest()
