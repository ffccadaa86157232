"""Counts the pairs of shards that have no count of record, and compares a few that have one with it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from clap_zero.data.members import BadSampleError, ShardContents, describe_suffixes
from clap_zero.data.places import ReadPolicy, is_pipe, is_remote, shown
from clap_zero.data.shards import Shard, ShardReader
from clap_zero.data.sizes import SIZES_FILE
from clap_zero.errors import DataError, one_line

_logger = logging.getLogger(__name__)
MAX_COUNTED = 4_096
"""Shards that are counted at the start of a run."""
_THREADS = 16
_AT_ONCE = 64


@dataclass
class Counted:
    """What was seen while shards were counted.

    Attributes:
        num_shards: shards whose headers were read.
        num_groups: keys, complete pairs or not.
        num_pairs: complete pairs.
        suffixes: how often each suffix occurs.
        fault: what was wrong with the first shard with which something was; "" without any.
    """

    num_shards: int = 0
    num_groups: int = 0
    num_pairs: int = 0
    suffixes: Counter[str] = field(default_factory=Counter)
    fault: str = ""


def _read_headers(path: str, policy: ReadPolicy) -> ShardContents | DataError:
    """What a shard holds, or why it cannot be read. A remote one is downloaded."""
    reader = ShardReader(policy, shards_kept=1)
    try:
        return reader.contents(Shard(path, path, 0))
    except BadSampleError as error:
        return DataError(f"{shown(path)}: {error}")
    except DataError as error:
        return error
    finally:
        reader.close()


def _count_each(paths: Sequence[str], *, policy: ReadPolicy, seen: Counted) -> Iterator[tuple[str, int | None]]:
    """(path, complete pairs) of each shard in order, read by several threads: other ranks wait for it.

    The count is None for one that cannot be read where the policy is to skip those.

    Raises:
        DataError: a shard cannot be read, and the policy is to stop then.
    """
    with ThreadPoolExecutor(_THREADS) as threads:
        for start in range(0, len(paths), _AT_ONCE):  # contents of a few only: one may have 262,144 members
            some = paths[start : start + _AT_ONCE]
            for path, found in zip(some, threads.map(lambda path: _read_headers(path, policy), some), strict=True):
                if isinstance(found, ShardContents):
                    yield path, _counted(path, found, seen)
                    continue
                if policy.missing != "skip":
                    raise found
                _logger.warning("%s: left out", found)
                yield path, None


def _counted(path: str, contents: ShardContents, seen: Counted) -> int:
    """Adds what a shard holds to what was seen, logs its faults, and returns its complete pairs."""
    for fault in contents.faults:
        said = one_line(f"{shown(path)}: {fault}")
        _logger.warning("%s", said)
        seen.fault = seen.fault or said
    lost = len(contents.keys) - contents.num_complete
    if lost:
        total = len(contents.keys)
        _logger.warning("%s: %d of %d keys lack audio or caption, they are not used", shown(path), lost, total)
    seen.num_shards += 1
    seen.num_groups += len(contents.keys)
    seen.num_pairs += contents.num_complete
    seen.suffixes.update(contents.suffixes)
    return contents.num_complete


def count_all(
    paths: Sequence[str], *, policy: ReadPolicy, seen: Counted, max_shards: int | None = MAX_COUNTED
) -> list[int | None]:
    """Complete pairs of each shard; None for one that cannot be read where the policy is to skip those.

    Args:
        paths: the shards.
        policy: how they are read.
        seen: takes what was seen.
        max_shards: more are refused: all ranks would wait for it, at every start.

    Raises:
        DataError: a shard cannot be read, and the policy is to stop then; or they are too many.
    """
    if max_shards is not None and len(paths) > max_shards:
        raise DataError(
            f"{_without_count(paths)}, and at most {max_shards} are counted at the start of a run: write that file "
            "with `clap-zero check`"
        )
    if all(is_pipe(path) for path in paths) and paths:
        _logger.warning("%s: run now to be counted", _without_count(paths))
    elif any(is_remote(path) for path in paths):
        _logger.warning("%s: downloaded now to be counted; `clap-zero check` writes that file", _without_count(paths))
    return [count for _, count in _count_each(paths, policy=policy, seen=seen)]


def _without_count(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - 1} more have" if len(paths) > 1 else " has"
    return f"{shown(paths[0])}{more} no count in a {SIZES_FILE} beside it"


def compare(some: Sequence[Shard], others: Iterable[Shard], *, policy: ReadPolicy) -> None:
    """Compares a few local shards with their counts of record; what differs is logged.

    Args:
        some: the shards to compare.
        others: looked at one after the other, only where none of `some` has a usable sample, until one has.
        policy: how they are read.

    Raises:
        DataError: none has a usable sample; or one cannot be read, and the policy is to stop then.
    """
    seen = Counted()
    counts = _count_each([shard.path for shard in some], policy=policy, seen=seen)
    for shard, (_, pairs) in zip(some, counts, strict=True):
        if pairs is not None and pairs != shard.num_samples:
            _logger.warning("%s has %d pairs, %s says %d", shard.path, pairs, SIZES_FILE, shard.num_samples)
    if some and seen.num_pairs == 0:
        paths = [shard.path for shard in others]
        if not any(count for _, count in _count_each(paths, policy=policy, seen=seen)):
            raise DataError(nothing_usable([some[0].path.rpartition("/")[0]], seen))


def nothing_usable(patterns: Sequence[str], seen: Counted) -> str:
    """The message for data without one pair."""
    return (
        f"{', '.join(map(shown, patterns))}: 0 usable of {seen.num_groups} samples: a sample needs KEY.flac (wav, ogg, "
        f"mp3, opus) and KEY.json or KEY.txt with equal KEY; suffixes seen: {describe_suffixes(seen.suffixes)}"
        + (f"; {seen.fault}" if seen.fault else "")
    )
