"""`sizes.json`, the count of record of a directory of shards: {"0.tar": 512, ...}."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from clap_zero.data.patterns import MAX_SHARDS
from clap_zero.data.regular import read_text
from clap_zero.data.tar import MAX_MEMBERS
from clap_zero.errors import DataError

SIZES_FILE = "sizes.json"
_MAX_SAMPLES = MAX_MEMBERS // 2


def read_sizes(directory: str) -> dict[str, int]:
    """The counts of record of a local directory.

    Raises:
        DataError: not readable, or not of the form {"0.tar": 512, ...}.
    """
    path = Path(directory) / SIZES_FILE
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise DataError(f"{path} cannot be read: {why}; remove it to have the shards counted") from error
    return parse_sizes(str(path), text)


def parse_sizes(path: str, text: str) -> dict[str, int]:
    """The counts in the text of a sizes.json. Raises DataError, as `read_sizes`."""
    try:
        text = text.removeprefix("\ufeff")
        sizes = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read: {error}; remove it to have the shards counted") from error
    if not isinstance(sizes, dict):
        raise DataError(f'{path} must look like {{"0.tar": 512, ...}}')
    if text.count(":") != len(sizes):  # as a rule each name has one: only a closer look tells which stands there twice
        names = Counter(name for name, _ in json.loads(text, object_pairs_hook=list))
        doubled = [name for name, number in names.items() if number > 1]
        if doubled:
            raise DataError(
                f"{path} counts {doubled[0]!r} {names[doubled[0]]} times: remove what is wrong, or the file, to "
                "have it written by `clap-zero check`"
            )
    odd = next((name for name in sizes if "/" in name or "\0" in name or name in ("", ".", "..")), None)
    if odd is not None:
        raise DataError(f"{path} lists {odd!r}: names must be plain names of files in this directory")
    if len(sizes) > MAX_SHARDS:
        raise DataError(f"{path} lists {len(sizes)} shards, {MAX_SHARDS} are possible")
    counts = sizes.values()
    if sizes and not (set(map(type, counts)) == {int} and 0 <= min(counts) <= max(counts) <= _MAX_SAMPLES):
        name, size = next((n, s) for n, s in sizes.items() if type(s) is not int or not 0 <= s <= _MAX_SAMPLES)
        raise DataError(
            f"{path}: the count of {name!r} must be a whole number up to {_MAX_SAMPLES:,}, the most pairs that are "
            f"read of a tar, is {repr(size)[:40]}"
        )
    return sizes
