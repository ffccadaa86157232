"""Samples that training must not see, such as the clips of an evaluation set: named by key, by id, or by content.

A file has a name a line; blank lines and what follows a `#` at the start of a line are passed over. A line is
- `sha256:HEX`, the SHA-256 of the audio member's bytes;
- anything else: a key (`train/0.tar::a/b`, `a/b` or its last part `b`, with or without the suffix of the sound), an
  id, or the address of a page of YouTube or Freesound. Shard parts are compared from their end, part by part:
  `train/0.tar::a/b` also names `sounds/train/0.tar::a/b`, its key beside a second set `train`.

A sample's ids are what its json has under `id`, `freesound_id`, `sound_id`, `youtube_id`, `ytid` or `video_id`, there
or in `original_data`; those in addresses under these names, `url` or `href`; and what the last part of its key shows: a
Freesound number in front of `__`, or behind `freesound`; a YouTube id of 11 letters, alone or behind a `Y`, with the
start and the end of the cut behind it or not.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import unicodedata
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from clap_zero.data.members import AUDIO_SUFFIXES
from clap_zero.data.places import absolute
from clap_zero.data.regular import read_text
from clap_zero.errors import DataError

_HASH_MARK = "sha256:"
_ID_FIELDS = ("id", "freesound_id", "sound_id", "youtube_id", "ytid", "video_id")
_URL_FIELDS = ("url", "href")
_ID_IN_URL = re.compile(
    r"(?:youtu\.be/|youtube(?:-nocookie)?\.com/(?:embed/|shorts/|v/|live/|watch\?(?:\S*&)?v=))([A-Za-z0-9_-]{11})"
    r"|freesound\.org/s/(\d+)|/people/[^/\s]+/sounds/(\d+)"
)
_ID_IN_NAME = (
    re.compile(r"(\d+)__.+"),  # 12345__user__title: Freesound's own names
    re.compile(r"(?i:freesound)[-_. ]?(\d+)"),
    re.compile(r"Y?([A-Za-z0-9_-]{11})(?:_\d+(?:\.\d+)?){0,2}"),  # AudioSet, with start and end of the cut
)


class Blacklist:
    """A set of names, kept as sorted 64-bit hashes: 8 MB for a million of them, in every worker.

    Args:
        names: keys, ids and `sha256:HEX` marks.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        # Numbers only, from the first name on: a million names as Python strings are ten times as large.
        marks, others = array("Q"), array("Q")
        for name in names:
            if name.lower().startswith(_HASH_MARK):
                marks.append(_number(name.lower()))
            else:
                others.append(_number(name))
        self._names, self._marks = (np.unique(np.array(numbers, dtype=np.uint64)) for numbers in (others, marks))

    @classmethod
    def read(cls, paths: Sequence[str]) -> Blacklist:
        """Reads all files.

        Raises:
            DataError: a file cannot be read, or a `sha256:` is not followed by 64 hexadecimal digits.
        """
        return cls(name for path in paths for name in _names(path))

    def __len__(self) -> int:
        return len(self._names) + len(self._marks)

    def has(self, key: str, *, audio: bytes, texts: Mapping[str, bytes]) -> bool:
        """Whether a sample is named.

        Args:
            key: `shard::basename`.
            audio: bytes of the audio member.
            texts: bytes of the text members by suffix.
        """
        return next(self._matches(key, audio, texts), None) is not None

    def matches(self, key: str, *, audio: bytes, texts: Mapping[str, bytes]) -> frozenset[int]:
        """The names, as hashes, that name a sample; arguments as those of `has`."""
        return frozenset(self._matches(key, audio, texts))

    def _matches(self, key: str, audio: bytes, texts: Mapping[str, bytes]) -> Iterator[int]:
        if len(self._marks):
            mark = _number(_HASH_MARK + hashlib.sha256(audio).hexdigest())
            if _contains(self._marks, mark):
                yield mark
        if len(self._names):
            yield from (number for number in map(_number, _own_names(key, texts)) if _contains(self._names, number))


def told_counts(paths: Sequence[str]) -> list[str]:
    """A line a file: how many names it has.

    Raises:
        DataError: a file cannot be read; see `Blacklist.read`.
    """
    return [f"data.blacklist {path}: {len(Blacklist.read([path]))} names of pairs to leave out" for path in paths]


def _names(path: str) -> Iterator[str]:
    try:
        text = read_text(absolute(path), encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise DataError(
            f"data.blacklist: {path} cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from error
    for number, line in enumerate(io.StringIO(text, newline=None), start=1):
        name = line.strip()
        if not name or name.startswith("#"):
            continue
        if name.lower().startswith(_HASH_MARK) and not re.fullmatch(r"[0-9a-f]{64}", name[len(_HASH_MARK) :].lower()):
            raise DataError(
                f"data.blacklist: {path}, line {number}: {_HASH_MARK} needs 64 hexadecimal digits behind it"
            )
        yield _id_in(name) or _without_suffix(name)


def _id_in(text: str) -> str | None:
    """The id in the address of a page; None where the text is no such address."""
    match = _ID_IN_URL.search(text) if "/" in text else None
    return None if match is None else next(filter(None, match.groups()))


def _without_suffix(name: str) -> str:
    suffix = next((s for s in AUDIO_SUFFIXES if name.lower().endswith(s)), "")
    return name[: len(name) - len(suffix)] or name


def _own_names(key: str, texts: Mapping[str, bytes]) -> Iterator[str]:
    """All names that a sample goes by."""
    shard, _, base = key.partition("::")
    last = base.rsplit("/", 1)[-1]
    yield from {base, last}
    parts = shard.split("/")
    for first in range(len(parts)):
        yield f"{'/'.join(parts[first:])}::{base}"
    for pattern in _ID_IN_NAME:
        match = pattern.fullmatch(last)
        if match is not None:
            yield match.group(1)
    record = _json(texts.get(".json", b""))
    for fields in (record, record.get("original_data")):
        if isinstance(fields, dict):
            for field in (*_ID_FIELDS, *_URL_FIELDS):
                value = fields.get(field)
                if isinstance(value, str) and (found := _id_in(value)):
                    yield found
                elif isinstance(value, str | int) and field in _ID_FIELDS:
                    yield str(value).strip()


def _json(data: bytes) -> dict[str, Any]:
    """The object in a json; {} for what is none: that the sample is unusable is said where captions are read."""
    try:
        record = json.loads(data) if data else {}
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def _number(name: str) -> int:
    if not name.isascii():
        name = unicodedata.normalize("NFC", name)  # file names of a Mac have accents apart from their letters
    return int.from_bytes(hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "little")


def _contains(numbers: np.ndarray, number: int) -> bool:
    wanted = np.uint64(number)
    place = int(np.searchsorted(numbers, wanted))
    return place < len(numbers) and bool(numbers[place] == wanted)
