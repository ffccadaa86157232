"""Counts the pairs of shards that have no count of record, and compares a few that have one with it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from clap_zero.data.find import SIZES_FILE
from clap_zero.data.places import ReadPolicy, is_remote, shown
from clap_zero.data.shards import BadSampleError, Shard, ShardReader, describe_suffixes
from clap_zero.errors import DataError

_logger = logging.getLogger(__name__)


@dataclass
class Counted:
    """What was seen while shards were counted.

    Attributes:
        num_groups: keys, complete pairs or not.
        num_pairs: complete pairs.
        suffixes: how often each suffix occurs.
    """

    num_groups: int = 0
    num_pairs: int = 0
    suffixes: Counter[str] = field(default_factory=Counter)


def count_pairs(path: str, *, policy: ReadPolicy, seen: Counted) -> int:
    """Complete pairs of a shard; its faults are logged. A remote one is downloaded.

    Raises:
        DataError: it cannot be read.
    """
    reader = ShardReader(policy, shards_kept=1)
    try:
        contents = reader.contents(Shard(path, path, 0))
    except BadSampleError as error:
        raise DataError(f"{shown(path)}: {error}") from error
    finally:
        reader.close()
    for fault in contents.faults:
        _logger.warning("%s %s", shown(path), fault)
    lost = len(contents.keys) - contents.num_complete
    if lost:
        total = len(contents.keys)
        _logger.warning("%s: %d of %d keys lack audio or caption, they are not used", shown(path), lost, total)
    seen.num_groups += len(contents.keys)
    seen.num_pairs += contents.num_complete
    seen.suffixes.update(contents.suffixes)
    return contents.num_complete


def count_all(paths: Sequence[str], *, policy: ReadPolicy, seen: Counted) -> list[int | None]:
    """Complete pairs of each shard; None for one that cannot be read where the policy is to skip those.

    Raises:
        DataError: a shard cannot be read, and the policy is to stop then.
    """
    if any(is_remote(path) for path in paths):
        _logger.warning(
            "%s and %d more have no count in a %s beside them: they are downloaded now to be counted; "
            "`clap-zero check` writes that file",
            shown(paths[0]),
            len(paths) - 1,
            SIZES_FILE,
        )
    counts: list[int | None] = []
    for path in paths:
        try:
            counts.append(count_pairs(path, policy=policy, seen=seen))
        except DataError as error:
            if policy.missing != "skip":
                raise
            _logger.warning("%s: left out", error)
            counts.append(None)
    return counts


def compare(shards: Sequence[Shard], *, policy: ReadPolicy) -> None:
    """Compares local shards with their counts of record; what differs is logged.

    Raises:
        DataError: none of them has a usable sample.
    """
    seen = Counted()
    for shard in shards:
        pairs = count_pairs(shard.path, policy=policy, seen=seen)
        if pairs != shard.num_samples:
            _logger.warning("%s has %d pairs, %s says %d", shard.path, pairs, SIZES_FILE, shard.num_samples)
    if shards and seen.num_pairs == 0:
        raise DataError(nothing_usable([shards[0].path.rpartition("/")[0]], seen))


def nothing_usable(patterns: Sequence[str], seen: Counted) -> str:
    """The message for data without one pair."""
    return (
        f"{', '.join(map(shown, patterns))}: 0 usable of {seen.num_groups} samples: a sample needs KEY.flac (wav, ogg, "
        f"mp3, opus) and KEY.json or KEY.txt with equal KEY; suffixes seen: {describe_suffixes(seen.suffixes)}"
    )
