"""Keys of the samples, and which items a part packs: both from the list of all items, before any of them is decoded.

So a key does not depend on what can be decoded, on the number of processes, or on how the work is divided.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath

from clap_zero.errors import ConfigError

_UNSAFE = re.compile(r"[^A-Za-z0-9_-]+")
_KEY_LENGTH = 80
_RESERVED = re.compile(r"con|prn|aux|nul|com\d|lpt\d", re.IGNORECASE)
"""Names that Windows keeps for itself, with any suffix: shards are unpacked there, too."""
_ALIGNED_FROM = 8
"""Parts of at least so many shards begin at the first item of a shard, so that they fill theirs as one pack would."""


@dataclass(frozen=True)
class Part:
    """Part `number` (from 1) of `count`."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Part:
        """Reads "3/64".

        Raises:
            ConfigError: it is none.
        """
        match = re.fullmatch(r"(\d+)/(\d+)", text)
        if match is None:
            raise ConfigError(f"--part {text}: write i/n, such as 3/64")
        part = cls(int(match[1]), int(match[2]))
        if not 1 <= part.number <= part.count:
            count = max(part.count, 1)
            raise ConfigError(f"--part {text}: parts are numbered from 1 to {count} (Slurm: --array=1-{count})")
        return part

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def share(self, num_items: int, shard_size: int) -> range:
        """The items of this part: one piece of the list, so that parts in their order are the whole list."""

        def bound(number: int) -> int:
            if number == self.count or num_items // self.count < _ALIGNED_FROM * shard_size:
                return num_items * number // self.count
            return num_items * number // self.count // shard_size * shard_size

        return range(bound(self.number - 1), bound(self.number))


@dataclass(frozen=True)
class Listing:
    """What is known of the items before they are decoded.

    Attributes:
        share: positions of the items to pack.
        keys: the key of each of them.
        fingerprint: changes with the splits and names of all items, and with their order.
    """

    share: range
    keys: list[str]
    fingerprint: str


def list_share(names: Iterable[tuple[str, str]], share: range) -> Listing:
    """Goes over all items once.

    Args:
        names: (split, name) of each item.
        share: positions of the items to pack.
    """
    makers: dict[str, KeyMaker] = {}
    keys, digest = [], hashlib.sha256()
    for position, (split, name) in enumerate(names):
        if split not in makers:
            makers[split] = KeyMaker()
        key = makers[split](name)
        digest.update(f"{split}\0{name}\n".encode("utf-8", "surrogatepass"))
        if position in share:
            keys.append(key)
    return Listing(share, keys, digest.hexdigest())


class KeyMaker:
    """Makes the keys of one split: safe in every file system and shell, without dots, unique also in lower case."""

    def __init__(self) -> None:
        # For each key that is taken the last number that was put behind it: thousands of recordings may have one name.
        self._taken: dict[str, int] = {}

    def __call__(self, name: str) -> str:
        stem = PurePosixPath(name).name
        stem = stem[: stem.rfind(".")] if "." in stem[1:] else stem
        base = _UNSAFE.sub("_", stem).strip("_-")[:_KEY_LENGTH] or "clip"
        if _RESERVED.fullmatch(base):
            base += "_"
        lowered, key = base.lower(), base
        number = self._taken.get(lowered, 0)
        while key.lower() in self._taken:
            number = max(number, 1) + 1
            key = f"{base}-{number}"
        self._taken[lowered] = number
        self._taken.setdefault(key.lower(), 0)
        return key
