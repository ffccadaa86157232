"""How clips are stored, and what becomes of each: what workers and their parent tell each other. Light to import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from clap_zero.data.pack_items import Item

SAMPLE_RATE_HZ = 48_000

Store = Literal["flac", "logmel"]
Truncation = Literal["fusion", "rand_trunc"]


@dataclass(frozen=True)
class Encoding:
    """How clips are stored.

    Attributes:
        max_seconds: longest part that is kept, from the start, in seconds.
        drop_silent: reject clips whose samples are all zero.
        truncation: the kind of model that the log-mel is stored for; None: FLAC is stored.
    """

    max_seconds: float
    drop_silent: bool = False
    truncation: Truncation | None = None

    @property
    def store(self) -> Store:
        """What is stored."""
        return "flac" if self.truncation is None else "logmel"


@dataclass(frozen=True)
class Encoded:
    """What became of an item.

    Attributes:
        item: the item, without the bytes of its file.
        data: what is stored; None where it was rejected. A view is good until the next item is asked for.
        num_samples: its length at 48 kHz.
        reason: why it was rejected.
        cut: it was longer than the limit and lost its end.
        silent: all its samples are zero.
        note: what is damaged in a file whose readable part is kept.
        shared_bytes: length of what lies in shared memory and will be `data`.
        unexpected: it was rejected for an error that nobody foresaw.
    """

    item: Item
    data: bytes | memoryview | None = None
    num_samples: int = 0
    reason: str | None = None
    cut: bool = False
    silent: bool = False
    note: str | None = None
    shared_bytes: int = 0
    unexpected: bool = False


def unexpected(item: Item, error: BaseException) -> Encoded:
    """What becomes of an item at an error that is no known fault of a file."""
    text = (str(error).strip().splitlines() or [""])[0]
    kind = type(error).__name__
    return Encoded(item.without_bytes(), reason=f"{kind}: {text}" if text else kind, unexpected=True)
