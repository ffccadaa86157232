"""Finds the shards that a data setting names, and how many samples each has, before anything is read.

A pattern is a split directory (`{root}/{split}/N.tar` with `sizes.json`), a directory of tars without it (then the
headers of all tars are read once, here), a tar, or a brace pattern such as `{root}/train/{000..009}.tar`. Counts in
`sizes.json` are the counts of record. The shard part of a sample's key is relative to the data root, the directory
above the split: `train/0.tar`; further directories are put before it only where two splits would get equal names.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from clap_zero.data.shards import Shard, describe_suffixes, scan_shard
from clap_zero.errors import DataError

_logger = logging.getLogger(__name__)
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}|\{([^{}]*,[^{}]*)\}")
_MAX_SHARDS = 10_000_000
_CHECKED_SHARDS = 8
SIZES_FILE = "sizes.json"


@dataclass(frozen=True)
class ShardIndex:
    """All shards of a data setting, in a fixed order. Kept as columns: a million shards are usual.

    Attributes:
        paths: absolute path of each shard.
        sizes: int64 (num_shards,): samples of each shard.
        prefix_parts: number of trailing parts of a path that make its key prefix.
    """

    paths: tuple[str, ...]
    sizes: np.ndarray
    prefix_parts: int = 2

    @property
    def num_samples(self) -> int:
        """Samples of an epoch."""
        return int(self.sizes.sum())

    @cached_property
    def fingerprint(self) -> str:
        """Hash over names and counts: equal for equal data wherever it lies."""
        digest = hashlib.sha256()
        for number, size in enumerate(self.sizes.tolist()):
            digest.update(f"{self.key_prefix(number)}\0{size}\n".encode("utf-8", "surrogateescape"))
        return digest.hexdigest()[:16]

    def key_prefix(self, number: int) -> str:
        """The first part of the keys of shard `number`'s samples."""
        return "/".join(self.paths[number].split("/")[-self.prefix_parts :])

    def shard(self, number: int) -> Shard:
        """Shard `number` as an object."""
        return Shard(self.paths[number], self.key_prefix(number), int(self.sizes[number]))


def load_index(patterns: Sequence[str]) -> ShardIndex:
    """Finds all shards of a data setting and their counts.

    A few shards are compared with their counts; what differs is logged as a warning.

    Args:
        patterns: split directories, directories of tars, tars, or brace patterns; see the module.

    Raises:
        DataError: a shard is missing or named twice, a count is not readable, or no sample can be used.
    """
    if not patterns:
        raise DataError("no data given: name split directories or tars, for example data/sounds/train")
    counts: dict[str, int] = {}
    scanned: set[str] = set()
    suffixes: Counter[str] = Counter()
    num_groups = 0
    for pattern in patterns:
        for path, count in _expand(str(pattern)):
            if path in counts:
                raise DataError(f"{path} is named twice in {list(patterns)}: each shard may be given once")
            if count is None:
                count, groups, seen = _count_pairs(path)
                num_groups += groups
                suffixes.update(seen)
                scanned.add(path)
            counts[path] = count
    sizes = np.fromiter(counts.values(), dtype=np.int64, count=len(counts))
    if sizes.sum() == 0:
        raise DataError(_nothing_usable(patterns, num_groups, suffixes))
    index = ShardIndex(tuple(counts), sizes, _prefix_parts(counts))
    _check_counts(index, scanned)
    return index


def _expand(pattern: str) -> Iterator[tuple[str, int | None]]:
    """Absolute paths of a pattern's shards with their counts of record (None: not known)."""
    if re.match(r"\w+://|pipe:", pattern):
        raise DataError(f"{pattern}: only local paths are read; copy or mount the shards and give their directory")
    path = Path(os.path.abspath(Path(pattern).expanduser()))  # noqa: PTH100  (resolve() would follow links)
    if path.is_dir():
        yield from _directory(path)
        return
    if "*" in pattern and not path.exists():
        raise DataError(f"{pattern}: '*' is not expanded; give the directory, or a range such as {{000..127}}.tar")
    names = [str(path)] if path.exists() else expand_braces(str(path))
    by_parent: dict[str, tuple[set[str], dict[str, int]]] = {}
    missing = []
    for name in names:
        parent, base = os.path.split(name)
        if parent not in by_parent:
            there = {entry.name for entry in Path(parent).iterdir()} if Path(parent).is_dir() else set()
            by_parent[parent] = there, (_read_sizes(Path(parent)) if SIZES_FILE in there else {})
        if base not in by_parent[parent][0]:
            missing.append(name)
    if missing:
        raise DataError(_missing(pattern, missing, len(names), {p: there for p, (there, _) in by_parent.items()}))
    for name in names:
        parent, base = os.path.split(name)
        yield name, by_parent[parent][1].get(base)


def expand_braces(pattern: str) -> list[str]:
    """Expands `{000..009}` and `{a,b}` as bash does: zero-padded where one end of the range is.

    Raises:
        DataError: the pattern stands for too many names.
    """
    match = _RANGE.search(pattern)
    if match is None:
        return [pattern]
    first, last, words = match.groups()
    if words is not None:
        values = words.split(",")
    else:
        low, high = int(first), int(last)
        if abs(high - low) >= _MAX_SHARDS:
            raise DataError(f"{pattern} stands for more than {_MAX_SHARDS} shards")
        padded = any(end.startswith("0") and len(end) > 1 for end in (first, last))
        width = max(len(first), len(last)) if padded else 0
        values = [str(n).zfill(width) for n in range(low, high + (1 if high >= low else -1), 1 if high >= low else -1)]
    head, tail = pattern[: match.start()], expand_braces(pattern[match.end() :])
    if len(values) * len(tail) > _MAX_SHARDS:
        raise DataError(f"{pattern} stands for more than {_MAX_SHARDS} shards")
    return [f"{head}{value}{rest}" for value in values for rest in tail]


def _directory(path: Path) -> Iterator[tuple[str, int | None]]:
    there = {entry.name for entry in path.iterdir()}
    tars = sorted((n for n in there if n.endswith(".tar") and not n.startswith(".")), key=natural_order)
    if SIZES_FILE not in there:
        if not tars:
            below = sorted(p.parent.name for p in path.glob("*/" + SIZES_FILE))
            hint = f"; it has the splits {below}: give one of them" if below else ""
            raise DataError(f"{path} holds no .tar files{hint}")
        for name in tars:
            yield str(path / name), None
        return
    sizes = _read_sizes(path)
    missing = [str(path / name) for name in sizes if name not in there]
    if missing:
        raise DataError(_missing(str(path / SIZES_FILE), missing, len(sizes), {str(path): there}))
    extra = [name for name in tars if name not in sizes]
    if extra:
        _logger.warning("%s does not list %d tars, they are not read: %s", path / SIZES_FILE, len(extra), extra[:3])
    for name in sorted(sizes, key=natural_order):
        yield str(path / name), sizes[name]


def natural_order(name: str) -> tuple[list[int | str], str]:
    """Sort key that puts 2.tar before 10.tar. Parts alternate between text and number, so they always compare."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)], name


def _read_sizes(directory: Path) -> dict[str, int]:
    path = directory / SIZES_FILE
    try:
        sizes = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}; remove it to have the shards counted") from error
    if not isinstance(sizes, dict):
        raise DataError(f'{path} must look like {{"0.tar": 512, ...}}')
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise DataError(f"{path}: the count of {name!r} must be a whole number, is {size!r}")
    return sizes


def _count_pairs(path: str) -> tuple[int, int, Counter[str]]:
    """(complete pairs, keys, suffixes) of a shard without a count of record; its faults are logged."""
    try:
        contents = scan_shard(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    for fault in contents.faults:
        _logger.warning("%s %s", path, fault)
    lost = len(contents.keys) - contents.num_complete
    if lost:
        _logger.warning("%s: %d of %d keys lack audio or caption, they are not used", path, lost, len(contents.keys))
    return contents.num_complete, len(contents.keys), contents.suffixes


def _check_counts(index: ShardIndex, scanned: set[str]) -> None:
    """Compares a few shards with their counts of record, spread over the index."""
    unscanned = [n for n, path in enumerate(index.paths) if path not in scanned and index.sizes[n] > 0]
    if not unscanned:
        return
    spread = np.linspace(0, len(unscanned) - 1, min(_CHECKED_SHARDS, len(unscanned))).round().astype(int)
    suffixes: Counter[str] = Counter()
    usable, groups = 0, 0
    for row in sorted(set(spread.tolist())):
        shard = index.shard(unscanned[row])
        complete, keys, seen = _count_pairs(shard.path)
        usable, groups = usable + complete, groups + keys
        suffixes.update(seen)
        if complete != shard.num_samples:
            _logger.warning("%s has %d pairs, %s says %d", shard.path, complete, SIZES_FILE, shard.num_samples)
    if usable == 0 and not scanned:
        raise DataError(_nothing_usable([Path(index.paths[unscanned[0]]).parent], groups, suffixes))


def _nothing_usable(patterns: Sequence[object], num_groups: int, suffixes: Counter[str]) -> str:
    places = ", ".join(str(pattern) for pattern in patterns)
    return (
        f"{places}: 0 usable of {num_groups} samples: a sample needs KEY.flac (wav, ogg, mp3, opus) and KEY.json or "
        f"KEY.txt with equal KEY; suffixes seen: {describe_suffixes(suffixes)}"
    )


def _missing(pattern: str, missing: list[str], total: int, there: dict[str, set[str]]) -> str:
    """What is missing, and the way out where one can be guessed."""
    shown = ", ".join(missing[:10]) + (", ..." if len(missing) > 10 else "")
    message = f"{pattern}: {len(missing)} of {total} shards are missing: {shown}"
    wanted = {_unpadded(name) for name in missing}
    alike = sorted(
        str(Path(parent) / name)
        for parent, names in there.items()
        for name in names
        if _unpadded(str(Path(parent) / name)) in wanted
    )
    if alike:
        return f"{message}; the numbers there are padded otherwise: {alike[0]}"
    tars = sorted((name for names in there.values() for name in names if name.endswith(".tar")), key=natural_order)
    return f"{message}; there are {len(tars)} tars" + (f", {tars[0]} to {tars[-1]}" if tars else "")


def _unpadded(name: str) -> str:
    return re.sub(r"\d+", lambda digits: str(int(digits.group())), name)


def _prefix_parts(paths: dict[str, int]) -> int:
    """Fewest trailing parts (at least split and name) that keep the key prefixes of all shards apart."""
    directories = {tuple(path.split("/")[:-1]) for path in paths}
    parts = 1
    while len({directory[-parts:] for directory in directories}) < len(directories):
        parts += 1
    return parts + 1
