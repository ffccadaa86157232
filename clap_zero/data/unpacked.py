"""What somebody names who has no shards yet: a folder of recordings, a table, a dataset. Each has its command."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from clap_zero.data.members import AUDIO_SUFFIXES

_TABLES = (".csv", ".tsv", ".jsonl")
_DATASET = (".arrow", ".parquet")
_MOST_SEEN = 2_000
_DEPTH = 3
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def instead_of_shards(pattern: str, path: str) -> str | None:
    """What is at a local place that holds no shards, and the way to shards; None where that is left to others.

    Args:
        pattern: as it was typed.
        path: the same, absolute.
    """
    place = Path(path)
    if os.path.isdir(path):  # noqa: PTH112  (Path.is_dir raises where a name is longer than names may be)
        return _of_directory(place)
    suffix = place.suffix.lower()
    if os.path.exists(path):  # noqa: PTH110
        if suffix in _TABLES:
            return f"{path} is a table, not a shard: {_pack('--manifest', path)}"
        if suffix in _DATASET:
            return f"{path} is a part of a dataset, not a shard: {_pack('--dataset', place.parent)}"
        if suffix in AUDIO_SUFFIXES:
            return f"{path} is a recording, not a shard: {_pack('--folder', place.parent)}"
        return None
    if suffix == ".tar" or "{" in pattern:
        return None
    if "*" in pattern:
        return _of_directory(place.parent) if place.parent.is_dir() else None
    beside: list[str] = []
    with contextlib.suppress(OSError):  # there is no such directory, or it is not for us to read
        beside = [one.name for one in place.parent.iterdir()]
    close = difflib.get_close_matches(place.name, beside, n=1)
    if close:
        return f"{path} is not there: did you mean {place.parent / close[0]}?"
    if _HUB_NAME.fullmatch(pattern):
        return f"{path} is not there; if a dataset of the Hugging Face hub is meant: {_pack('--dataset', pattern)}"
    return f"{path} is not there; to make shards: {_pack('--folder', 'RECORDINGS')}"


def _of_directory(place: Path) -> str:
    below = sorted({str(Path(name).parent) for name in _files_below(place) if name.endswith(".tar")} - {"."})
    if below:
        shown = ", ".join(below[:5]) + (", ..." if len(below) > 5 else "")
        one = place / ("train" if "train" in below else below[0])
        return f"{place} holds no .tar files; there are some in its {shown}: give {one}"
    names = list(_files_below(place))
    suffixes = {Path(name).suffix.lower(): name for name in reversed(names)}
    for known, kind, flag, of_itself in (
        (_DATASET, "a Hugging Face dataset", "--dataset", True),
        (_TABLES, "a table", "--manifest", False),
        (AUDIO_SUFFIXES, "recordings", "--folder", True),
    ):
        found = next((suffixes[suffix] for suffix in known if suffix in suffixes), None)
        if found is not None:
            source = place if of_itself else place / found
            return f"{place} holds {kind} ({found}) and no .tar files: {_pack(flag, source)}"
    return (
        f"{place} {'holds no .tar files' if names else 'is empty'}; to make shards: {_pack('--folder', 'RECORDINGS')}"
    )


def _files_below(place: Path) -> Iterator[str]:
    """Names of files, relative, nearest first within a few levels; of a huge folder only some."""
    seen = 0
    for directory, folders, names in os.walk(place):
        relative = Path(directory).relative_to(place)
        folders[:] = (
            sorted(name for name in folders if not name.startswith(".")) if len(relative.parts) < _DEPTH else []
        )
        for name in sorted(names):
            seen += 1
            if seen > _MOST_SEEN:
                return
            if not name.startswith("."):
                yield str(relative / name)


def _pack(flag: str, source: Path | str) -> str:
    return f"run clap-zero pack {flag} {shlex.quote(str(source))} --out DIR, and give DIR/train"
