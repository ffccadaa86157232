"""Finds the shards that one pattern stands for, here or at a URL, with their counts of record. Reads no shard.

A pattern is a split directory (`{root}/{split}/N.tar` with `sizes.json`), a local directory of tars without it, a tar,
or a brace pattern such as `{root}/train/{000..009}.tar`. `sizes.json` of a remote directory is also the list of its
shards, because not every place can be listed.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from clap_zero.data import sources
from clap_zero.data.patterns import (
    describe_missing,
    expand_braces,
    expand_by_directory,
    natural_sorted,
    spread,
)
from clap_zero.data.places import ReadPolicy, absolute, is_pipe, is_remote, join, local_path, shown
from clap_zero.data.sizes import SIZES_FILE, parse_sizes, read_sizes
from clap_zero.data.spans import SPANS_FILE
from clap_zero.data.unpacked import instead_of_shards
from clap_zero.errors import DataError

_logger = logging.getLogger(__name__)
UNKNOWN = -1
MAX_ASKED = 256
"""More remote shards than this are not asked for one by one; what is missing then shows when it is read."""
_ASKED = 8
_SPECIAL = re.compile(r"[/%?#\0]")
_STAR = "{}: '*' is not expanded; give the directory, or a range such as {{000..127}}.tar"


@dataclass(frozen=True)
class Found:
    """Shards of one directory.

    Attributes:
        head: what stands before each name: path or URL with its last slash; the whole path where names are empty.
        tail: what stands after each name: the query of a signed URL.
        names: names of the tars.
        sizes: int64 (n,): counts of record, -1 where there is none.
        rows: int64 (n,): row of each shard's first sample in the directory's spans.npy; None without one.
        num_rows: rows that the directory's spans.npy must have.
    """

    head: str
    tail: str
    names: list[str]
    sizes: np.ndarray
    rows: np.ndarray | None = None
    num_rows: int = 0

    def path(self, number: int) -> str:
        """Path or URL of a shard."""
        return f"{self.head}{self.names[number]}{self.tail}"

    def only(self, numbers: np.ndarray) -> Found:
        """Some of the shards."""
        names = [self.names[number] for number in numbers.tolist()]
        rows = None if self.rows is None else self.rows[numbers]
        return replace(self, names=names, sizes=self.sizes[numbers], rows=rows)


def find_shards(pattern: str, policy: ReadPolicy) -> list[Found]:
    """The shards of a pattern, directory by directory.

    Raises:
        DataError: something is missing (and policy.missing is not "skip"), or not readable; with the way out.
    """
    if is_pipe(pattern):
        return _pipes(pattern, policy)
    if is_remote(pattern):
        return _remote(pattern, policy)
    path = absolute(local_path(pattern))
    if os.path.isdir(path):  # noqa: PTH112  (Path.is_dir raises where a list in braces is longer than names may be)
        return [_directory(path, policy)]
    exists = os.path.exists(path)  # noqa: PTH110
    instead = instead_of_shards(pattern, path) if exists or policy.missing != "skip" else None
    if instead is not None:
        raise DataError(instead)
    if "*" in pattern and not exists:
        raise DataError(_STAR.format(pattern))
    parent, base = os.path.split(path)
    grouped = {f"{parent}/": [base]} if exists else expand_by_directory(path)
    found, missing, there = [], [], {}
    for head, names in grouped.items():
        there[head] = _listed(head)
        sizes = read_sizes(head) if SIZES_FILE in there[head] else {}
        missing += [head + name for name in names if name not in there[head]]
        kept = [name for name in names if name in there[head]]
        found.append(_chosen(head, "", kept, sizes, with_spans=SPANS_FILE in there[head]))
    _refuse_missing(pattern, missing, sum(map(len, grouped.values())), there, policy)
    return found


def _listed(directory: str) -> set[str]:
    try:
        with os.scandir(directory) as entries:
            return {entry.name for entry in entries}
    except FileNotFoundError:
        return set()
    except OSError as error:
        raise DataError(f"{directory} cannot be listed: {error.strerror or error}") from error


def _directory(path: str, policy: ReadPolicy) -> Found:
    head = f"{path.rstrip('/')}/"
    there = _listed(head)
    if SIZES_FILE not in there:
        names = natural_sorted(name for name in there if _is_tar(name))
        if not names:
            raise DataError(instead_of_shards(path, path))
        return _chosen(head, "", names, {}, with_spans=False)
    sizes = read_sizes(head)
    missing = [head + name for name in sizes if name not in there]
    _refuse_missing(head + SIZES_FILE, missing, len(sizes), {head: there}, policy)
    extra = natural_sorted(name for name in there if _is_tar(name) and name not in sizes)
    if extra:
        _logger.warning("%s%s does not list %d tars, they are not read: %s", head, SIZES_FILE, len(extra), extra[:3])
    names = [name for name in sizes if name in there] if missing else list(sizes)
    return _chosen(head, "", natural_sorted(names), sizes, with_spans=SPANS_FILE in there, whole=not missing)


def _is_tar(name: str) -> bool:
    return name.endswith(".tar") and not name.startswith(".")


def _chosen(
    head: str, tail: str, names: list[str], sizes: dict[str, int], *, with_spans: bool, whole: bool = False
) -> Found:
    """Some shards of a directory, with the rows that they have in its spans.npy, which has all in the natural order.

    Args:
        head: as in Found, like `tail` and `names`.
        sizes: counts of record of the directory; shards that are not in it are UNKNOWN.
        with_spans: whether there is a spans.npy.
        whole: the names are all of `sizes` in the natural order.
    """
    counts = np.fromiter((sizes.get(name, UNKNOWN) for name in names), dtype=np.int64, count=len(names))
    if not with_spans or not sizes:
        return Found(head, tail, names, counts)
    if whole:
        return Found(head, tail, names, counts, np.cumsum(counts) - counts, int(counts.sum()))
    everything = natural_sorted(sizes)
    ends = np.cumsum(np.fromiter((sizes[name] for name in everything), dtype=np.int64, count=len(everything)))
    first_row = dict(zip(everything, (ends - [sizes[name] for name in everything]).tolist(), strict=True))
    rows = np.fromiter((first_row.get(name, UNKNOWN) for name in names), dtype=np.int64, count=len(names))
    return Found(head, tail, names, counts, rows, int(ends[-1]))


def _refuse_missing(
    pattern: str, missing: Sequence[str], total: int, there: dict[str, set[str]], policy: ReadPolicy
) -> None:
    """Raises DataError for missing shards, or says that they are left out."""
    if not missing:
        return
    message = describe_missing(pattern, missing, total, there)
    if policy.missing != "skip":
        raise DataError(message)
    _logger.warning("%s: left out", message.removesuffix("; --data.missing_shards skip leaves them out"))


def _pipes(pattern: str, policy: ReadPolicy) -> list[Found]:
    if not policy.allow_pipe:
        raise DataError(f"{shown(pattern)} would run a command on this machine: allow it with --data.allow_pipe true")
    unknown = np.array([UNKNOWN])
    return [Found(command, "", [""], unknown) for command in expand_braces(pattern)]


def _remote(pattern: str, policy: ReadPolicy) -> list[Found]:
    base, mark, query = pattern.partition("?")
    tail = mark + query
    if "*" in base:
        raise DataError(_STAR.format(shown(pattern)))
    if not base.endswith(".tar"):
        return [_remote_directory(pattern, policy)]
    found, missing, there = [], [], {}
    for head, names in expand_by_directory(base).items():
        sizes = _remote_sizes(head, tail, policy)
        there[shown(head)] = set(sizes)
        absent = set(_absent(head, tail, names, sizes, policy))
        missing += [shown(f"{head}{name}{tail}") for name in names if name in absent]
        kept = [name for name in names if name not in absent]
        with_spans = bool(sizes) and sources.exists(f"{head}{SPANS_FILE}{tail}", policy)
        found.append(_chosen(head, tail, kept, sizes, with_spans=with_spans))
    _refuse_missing(shown(pattern), missing, len(missing) + sum(len(f.names) for f in found), there, policy)
    return found


def _remote_directory(url: str, policy: ReadPolicy) -> Found:
    base, mark, query = url.partition("?")
    head, tail = f"{base.rstrip('/')}/", mark + query
    sizes = _remote_sizes(head, tail, policy)
    if not sizes:
        if mark and not base.endswith("/"):  # https://host/download?id=17: no directory, but a shard of any name
            return Found(url, "", [""], np.array([UNKNOWN]))
        names = natural_sorted(name for name in sources.list_names(head + tail, policy) if _is_tar(name))
        if names:
            return _quoted(_chosen(head, tail, names, {}, with_spans=False))
        raise DataError(
            f"{shown(url)}: no {SIZES_FILE} there, and tars cannot be listed there without it: name them, as in "
            f"{shown(head)}{{000..127}}.tar, or write it with `clap-zero check` and upload it"
        )
    with_spans = sources.exists(f"{head}{SPANS_FILE}{tail}", policy)
    found = _quoted(_chosen(head, tail, natural_sorted(sizes), sizes, with_spans=with_spans, whole=True))
    rows = range(len(found.names))
    absent = [row for row in spread(rows, _ASKED) if not _is_there(found.path(row), policy)]
    if not absent:
        return found
    missing = [shown(found.path(row)) for row in absent]
    _refuse_missing(shown(head) + SIZES_FILE, missing, len(rows), {}, policy)
    return found.only(np.setdiff1d(rows, absent))


def _quoted(found: Found) -> Found:
    """The same with names as they stand in URLs; a list of names comes from elsewhere and may say anything."""
    if _SPECIAL.search("\n".join(found.names)) is None and {"", ".", ".."}.isdisjoint(found.names):
        return found
    urls = [name if _is_plain(name) else join(found.head + found.tail, name) for name in found.names]
    cut = len(found.head), len(found.tail)
    names = [
        url if _is_plain(name) else url[cut[0] : len(url) - cut[1]] for name, url in zip(found.names, urls, strict=True)
    ]
    return replace(found, names=names)


def _is_plain(name: str) -> bool:
    return _SPECIAL.search(name) is None and name not in ("", ".", "..")


def _remote_sizes(head: str, tail: str, policy: ReadPolicy) -> dict[str, int]:
    url = f"{head}{SIZES_FILE}{tail}"
    if not sources.exists(url, policy):
        return {}
    return parse_sizes(shown(url), sources.read_text(url, policy))


def _absent(head: str, tail: str, names: Sequence[str], sizes: Collection[str], policy: ReadPolicy) -> Iterator[str]:
    """Names in no list that are not there when asked for; a request each, so of many only some are asked for."""
    unlisted = [name for name in names if name not in sizes]
    asked = unlisted if len(unlisted) <= MAX_ASKED else spread(unlisted, _ASKED)
    yield from (name for name in asked if not _is_there(f"{head}{name}{tail}", policy))


def _is_there(url: str, policy: ReadPolicy) -> bool:
    """Whether a shard is there. One that may be passed over and does not answer now is asked again when it is read."""
    try:
        return sources.exists(url, policy)
    except DataError:
        if policy.missing == "skip":
            return True
        raise
