"""Columns of an index: a million names and numbers without a million Python objects, and small when they travel."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

_LEVEL = 1  # names and counts are so regular that more effort gains little


@dataclass(frozen=True)
class Names:
    """Texts, one after the other in one piece of memory.

    Attributes:
        blob: all of them as UTF-8.
        ends: int64 (n,): where each ends.
    """

    blob: bytes
    ends: np.ndarray

    @classmethod
    def of(cls, lists: Iterable[Sequence[str]]) -> Names:
        """The texts of several lists, in their order."""
        blobs, lengths = [], [np.zeros(0, dtype=np.int64)]
        for texts in lists:
            blob = "".join(texts)
            if blob.isascii():
                sizes: Iterable[int] = map(len, texts)
            else:
                sizes = (len(_encode(text)) for text in texts)
            blobs.append(_encode(blob))
            lengths.append(np.fromiter(sizes, dtype=np.int64, count=len(texts)))
        return cls(b"".join(blobs), np.cumsum(np.concatenate(lengths)))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, number: int) -> str:
        start = int(self.ends[number - 1]) if number else 0
        return self.blob[start : int(self.ends[number])].decode("utf-8", "surrogateescape")

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return _unpack_names, (zlib.compress(self.blob, _LEVEL), pack_integers(self.ends))


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _unpack_names(blob: bytes, ends: bytes) -> Names:
    return Names(zlib.decompress(blob), unpack_integers(ends))


def pack_integers(column: np.ndarray) -> bytes:
    """An int64 column of regular numbers (counts, their sums, repeated ids) in few bytes."""
    return zlib.compress(np.diff(column, prepend=np.int64(0)).tobytes(), _LEVEL)


def unpack_integers(data: bytes) -> np.ndarray:
    """What `pack_integers` packed."""
    return np.cumsum(np.frombuffer(zlib.decompress(data), dtype=np.int64))
