"""The directories of shards: their names in keys and messages, and shards that are named twice."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from clap_zero.data.find import Found
from clap_zero.data.places import is_pipe, is_remote, shown
from clap_zero.errors import DataError


@dataclass(frozen=True)
class Place:
    """A directory of shards.

    Attributes:
        head: what stands before a shard's name: path or URL with its last slash.
        tail: what stands after it: the query of a signed URL.
        label: head as it is shown, without credentials; keys are made of it.
        num_rows: rows that its spans.npy must have, if it has one.
    """

    head: str
    tail: str
    label: str
    num_rows: int = 0


def name_places(found: Sequence[Found]) -> dict[tuple[str, str], Place]:
    """The directories by (head, tail). Commands that are shown alike get a hash of the whole command to their names."""
    heads = list(dict.fromkeys(part.head for part in found))
    times = Counter(map(shown, heads))
    labels = {}
    for head in heads:
        ambiguous = is_pipe(head) and times[shown(head)] > 1
        mark = f"#{hashlib.sha256(head.encode('utf-8', 'replace')).hexdigest()[:8]}" if ambiguous else ""
        labels[head] = shown(head) + mark
    places: dict[tuple[str, str], Place] = {}
    for part in found:
        known = places.get((part.head, part.tail))
        num_rows = max(part.num_rows, known.num_rows if known is not None else 0)
        places[part.head, part.tail] = Place(part.head, part.tail, labels[part.head], num_rows)
    return places


def refuse_doubles(found: Sequence[Found]) -> None:
    """Raises DataError when a shard is named twice; weights are the way to see data more often."""
    by_label: dict[str, list[Found]] = {}
    for part in found:
        if not is_remote(part.head):
            label = f"{os.path.realpath(part.head)}/"
        else:
            label = part.head if is_pipe(part.head) else shown(part.head)
        by_label.setdefault(label, []).append(part)
    for label, parts in by_label.items():
        names = [name for part in parts for name in part.names]
        taken: set[str] = set()
        if len(parts) > 1 or len(set(names)) < len(names):
            doubled = next((name for name in names if name in taken or taken.add(name)), None)  # type: ignore[func-returns-value]
            if doubled is not None:
                raise DataError(
                    f"{shown(label)}{doubled} is named twice: each shard may be given once; to see a data set more "
                    "often give it a weight"
                )


def prefix_parts(labels: set[str]) -> int:
    """Fewest trailing parts (at least split and name) that keep the key prefixes of all shards apart."""
    parts = 2
    while len({last_parts(label, parts) for label in labels}) < len(labels):
        parts += 1
    return parts


def last_parts(path: str, count: int) -> str:
    return "/".join(path.split("/")[-count:])
