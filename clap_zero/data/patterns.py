"""Names of shards: brace patterns, the order of numbers in names, what is missing and what was probably meant."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from typing import TypeVar

import numpy as np

from clap_zero.data.places import shown
from clap_zero.errors import DataError

MAX_SHARDS = 10_000_000
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}|\{([^{}]*,[^{}]*)\}")
_NESTED = re.compile(r"\{[^{}]*\{[^{}]*(?:,|\.\.)[^{}]*\}[^{}]*\}")
_DIGITS = "0123456789"
_MAX_DIGITS = 4_000
"""Python makes no number of more than 4,300 digits."""


def expand_braces(pattern: str) -> list[str]:
    """Expands `{000..009}` and `{a,b}` as bash does: zero-padded where one end of the range is.

    Raises:
        DataError: the pattern stands for too many names, or has braces within braces.
    """
    if _NESTED.search(pattern):
        raise DataError(f"{shown(pattern)}: braces within braces are not expanded; give one pattern for each")
    match = _RANGE.search(pattern)
    if match is None:
        return [pattern]
    first, last, words = match.groups()
    if words is not None:
        values = words.split(",")
    else:
        low, high = int(first[:_MAX_DIGITS]), int(last[:_MAX_DIGITS])
        if abs(high - low) >= MAX_SHARDS:
            raise DataError(f"{shown(pattern)} stands for more than {MAX_SHARDS} shards")
        padded = any(end.startswith("0") and len(end) > 1 for end in (first, last))
        width = max(len(first), len(last)) if padded else 0
        values = [str(n).zfill(width) for n in range(low, high + (1 if high >= low else -1), 1 if high >= low else -1)]
    head, tail = pattern[: match.start()], expand_braces(pattern[match.end() :])
    if len(values) * len(tail) > MAX_SHARDS:
        raise DataError(f"{shown(pattern)} stands for more than {MAX_SHARDS} shards")
    return [f"{head}{value}{rest}" for value in values for rest in tail]


def expand_by_directory(pattern: str) -> dict[str, list[str]]:
    """The names that a brace pattern stands for, in order, under the directory of each (with its last slash)."""
    cut = pattern.rfind("/") + 1
    directory, base = pattern[:cut], pattern[cut:]
    if directory.count("{") == directory.count("}"):  # else a slash within braces: {a/0,b/1}.tar
        names = expand_braces(base)
        directories = expand_braces(directory)
        if len(names) * len(directories) > MAX_SHARDS:
            raise DataError(f"{shown(pattern)} stands for more than {MAX_SHARDS} shards")
        return {place: list(names) for place in directories}
    grouped: dict[str, list[str]] = {}
    for path in expand_braces(pattern):
        place, slash, name = path.rpartition("/")
        grouped.setdefault(place + slash, []).append(name)
    return grouped


def natural_order(name: str) -> tuple[list[int | str], str]:
    """Sort key that puts 2.tar before 10.tar. Parts alternate between text and number, so they always compare."""
    return [int(part[:_MAX_DIGITS]) if part.isdecimal() else part for part in re.split(r"(\d+)", name)], name


def natural_sorted(names: Iterable[str]) -> list[str]:
    """The names sorted by `natural_order`; without its cost where they differ in one number only, as they mostly do."""
    names = list(names)
    numbers = _only_numbers(names)
    if numbers is None:
        return sorted(names, key=natural_order)
    if (np.diff(numbers) > 0).all():
        return names
    order = np.argsort(numbers, kind="stable")
    if (np.diff(numbers[order]) == 0).any():  # 1.tar and 01.tar
        return sorted(names, key=natural_order)
    return [names[row] for row in order.tolist()]


def _only_numbers(names: Sequence[str]) -> np.ndarray | None:
    """int64 (len(names),): the one number in which the names differ; None where they are not of that kind."""
    if len(names) < 2:
        return None
    low, high = min(names), max(names)  # what both have in common at the start, all have
    head = low[: _num_common(low, high)].rstrip(_DIGITS)
    rest = low[len(head) :]
    tail = rest[len(rest) - _num_common(rest[::-1], high[len(head) :][::-1]) :].lstrip(_DIGITS)
    end = -len(tail) if tail else None
    middles = [name[len(head) : end] for name in names]
    together = "".join(middles)
    if not (together.isdigit() and together.isascii() and all(map(str.endswith, names, repeat(tail)))):
        return None
    if not 1 <= min(map(len, middles)) <= max(map(len, middles)) <= 18:
        return None
    return np.fromiter(map(int, middles), dtype=np.int64, count=len(middles))


T = TypeVar("T")


def _num_common(one: str, other: str) -> int:
    """Characters that both texts begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((number for number, (a, b) in pairs if a != b), min(len(one), len(other)))


def spread(items: Sequence[T], count: int) -> list[T]:
    """At most `count` of the items, evenly spread, the first and the last among them."""
    rows = np.linspace(0, len(items) - 1, min(count, len(items))).round().astype(int)
    return [items[row] for row in sorted(set(rows.tolist()))]


def describe_missing(pattern: str, missing: Sequence[str], total: int, there: Mapping[str, Iterable[str]]) -> str:
    """What is missing, and the way out where one can be guessed.

    Args:
        pattern: what was asked for.
        missing: paths that are not there.
        total: paths that were asked for.
        there: names that are there, by directory.
    """
    listed = ", ".join(missing[:10]) + (", ..." if len(missing) > 10 else "")
    message = f"{pattern}: {len(missing)} of {total} shards are missing: {listed}"
    wanted = {_unpadded(name) for name in missing}
    tars = [(parent, name) for parent, names in there.items() for name in names if name.endswith(".tar")]
    paths = (f"{parent.rstrip('/')}/{name}" for parent, name in tars)
    alike = sorted(path for path in paths if _unpadded(path) in wanted)
    if alike:
        return f"{message}; the numbers there are padded otherwise: {alike[0]}"
    names = natural_sorted(name for _, name in tars)
    range_shown = f", {names[0]} to {names[-1]}" if names else ""
    return f"{message}; there are {len(names)} tars{range_shown}; --data.missing_shards skip leaves them out"


def _unpadded(name: str) -> str:
    return re.sub(r"\d+", lambda digits: digits.group().lstrip("0") or "0", name)
