"""What is to be packed: items, and where a list of them comes from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Item:
    """One clip to pack.

    Attributes:
        split: its split.
        name: how the user knows it; for messages and for the json.
        path: audio file, or "" where `audio` holds the bytes.
        captions: at least one once the sidecars are read, unless there is a `reason`.
        tags: labels.
        original: other columns.
        audio: bytes of the audio file.
        reason: why it cannot be packed, where that is known already.
        sidecars: files of captions by suffix (".json", ".txt"), to be read with the audio.
        caption_key: key of the captions in a .json.
        key: its key in the split; "" until the list is complete.
    """

    split: str
    name: str
    path: str = ""
    captions: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    original: Mapping[str, object] = field(default_factory=dict)
    audio: bytes | None = None
    reason: str | None = None
    sidecars: Mapping[str, str] = field(default_factory=dict)
    caption_key: str = "text"
    key: str = ""

    def without_bytes(self) -> Item:
        """The item without its audio, to travel between processes."""
        return replace(self, audio=None) if self.audio is not None else self


@dataclass
class Source:
    """The items of a source and what was noticed while they were listed.

    Attributes:
        num_items: how many there are.
        names: (split, name) of every item, in their order; costs no audio.
        read: the items at these positions, in their order.
        num_rows: rows of the table, or files.
        num_duplicates: rows that say what an earlier row said.
        find_extra: audio files beside the listed ones that no row names, or texts without audio.
        content: what tells this source from another one, beside the names of its items.
    """

    num_items: int
    names: Callable[[], Iterator[tuple[str, str]]]
    read: Callable[[range], Iterator[Item]]
    num_rows: int
    num_duplicates: int = 0
    find_extra: Callable[[], list[str]] = list
    content: str = ""


def listed(items: Sequence[Item], **known: object) -> Source:
    """A source whose items are all known; `known` as in Source."""
    return Source(
        len(items),
        lambda: ((item.split, item.name) for item in items),
        lambda share: (items[position] for position in share),
        **{"num_rows": len(items), **known},  # type: ignore[arg-type]  # the caller's fields
    )
