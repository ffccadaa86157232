"""Items from a folder of recordings with a .json or .txt of the same name beside each."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from clap_zero.audio.kinds import AudioError
from clap_zero.data.captions import read_captions
from clap_zero.data.members import AUDIO_SUFFIXES, TEXT_SUFFIXES, BadSampleError, split_name
from clap_zero.data.pack_files import plain, read_file, readable
from clap_zero.data.pack_items import Item, Source, listed
from clap_zero.data.pack_tags import TAG_COLUMNS, read_tags
from clap_zero.errors import DataError

_MAX_SIDECAR_BYTES = 1 << 26


def from_folder(folder: Path, split: str, caption_key: str = "text") -> Source:
    """All audio files below a folder, each with a .json or .txt of the same name beside it.

    Links to folders are followed; a folder that is reached twice is read once, so loops end. What has the name of an
    audio file and is none (a pipe, a broken link) is an item, and is rejected when it is read; folders with such names
    are folders.

    Args:
        folder: searched with all folders in it.
        split: split of all items.
        caption_key: key of the captions in a .json.

    Raises:
        DataError: there is no audio file.
    """
    items, extra = [], []
    for directory, names, problem in _walk(folder):
        if problem is not None:
            shown = readable(os.path.relpath(directory, folder))
            items.append(Item(split, f"{shown}/", reason=f"the folder cannot be read: {problem}"))
        texts: dict[str, dict[str, str]] = {}
        audio: list[tuple[str, str]] = []
        for name in names:
            key, suffix = split_name(name) or ("", "")
            path = os.path.join(directory, name)  # noqa: PTH118  (millions of them)
            if suffix in TEXT_SUFFIXES:
                texts.setdefault(key, {})[suffix] = path
            elif suffix:
                audio.append((key, path))
        for key, path in audio:
            shown = readable(os.path.relpath(path, folder))
            reason = None if key in texts else "no .json or .txt beside it"
            sidecars = texts.get(key, {})
            items.append(Item(split, shown, path, reason=reason, sidecars=sidecars, caption_key=caption_key))
        used = {key for key, _ in audio}
        extra += [readable(path) for key, found in texts.items() if key not in used for path in found.values()]
    if not any(item.path for item in items):
        problems = "; ".join(f"{item.name} {item.reason}" for item in items[:3])
        raise DataError(f"{folder} holds no audio files ({' '.join(AUDIO_SUFFIXES)}){problems and '; ' + problems}")
    return listed(items, find_extra=lambda: extra)


def _walk(folder: Path) -> Iterator[tuple[str, Sequence[str], str | None]]:
    """(directory, sorted names of what is no directory, problem) of a folder and all below it, in a fixed order."""
    seen: set[tuple[int, int]] = set()
    ahead = [str(folder)]
    while ahead:
        directory = ahead.pop()
        files: list[str] = []
        below: list[str] = []
        try:
            found = os.stat(directory)  # noqa: PTH116  (millions of them)
            if (found.st_dev, found.st_ino) in seen:
                continue
            seen.add((found.st_dev, found.st_ino))
            with os.scandir(directory) as entries:
                for entry in entries:
                    (below if _is_directory(entry) else files).append(entry.name)
        except OSError as error:
            yield directory, [], error.strerror or str(error)
            continue
        yield directory, sorted(files), None
        below = [name for name in below if name != "__MACOSX"]
        ahead += [os.path.join(directory, name) for name in sorted(below, reverse=True)]  # noqa: PTH118


def _is_directory(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself: it turns up as a file that cannot be read
        return False


def read_sidecars(item: Item) -> Item:
    """The item with the captions, tags and other fields of its sidecar files; as it is where it has none.

    Raises:
        BadSampleError: a file cannot be read, or there is no usable caption.
    """
    if not item.sidecars:
        return item
    data: dict[str, bytes] = {}
    for suffix, path in item.sidecars.items():
        try:
            data[suffix] = read_file(path, max_bytes=_MAX_SIDECAR_BYTES)
        except AudioError as error:
            raise BadSampleError(f"its {suffix}: {error}") from error
    captions = read_captions(data, item.caption_key)
    record = json.loads(data[".json"]) if ".json" in data else {}
    used = (item.caption_key, *TAG_COLUMNS)
    try:
        original = {str(plain(key)): plain(value) for key, value in record.items() if key not in used}
    except RecursionError as error:
        raise BadSampleError("json nested too deeply") from error
    return replace(item, captions=tuple(captions), tags=read_tags(record), original=original)
