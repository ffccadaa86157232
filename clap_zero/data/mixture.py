"""Which parts of which shards make an epoch when several data sets are mixed with weights. Pure; only numpy.

A set with n samples and weight w is an endless sequence of its passes: each pass has all its samples once, its shards
in an order of their own. An epoch takes the next m = round(w n) samples of that sequence, so all epochs are equally
long. After E epochs each sample has been seen floor(E m / n) or one time more; with w = 1 exactly once in every epoch.

What an epoch takes of a set comes in pieces (a shard, or a part of one). The j-th of a set's p pieces is put at
(j + u) / p of the epoch, u uniform in [0, 1): stratified, so that a small set is spread over the whole epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from clap_zero.errors import DataError

_PASS_STREAM, _PLACE_STREAM = 3, 4
MAX_PIECES = 10_000_000
"""Most parts of shards of an epoch: its plan takes a gigabyte then, on every rank."""
_SEED_MASK = 2**64 - 1


def generator(seed: int, *stream: int) -> np.random.Generator:
    """An independent generator for each tuple of (seed, stream)."""
    return np.random.default_rng(np.random.SeedSequence(seed & _SEED_MASK, spawn_key=stream))


def samples_per_epoch(num_stored: int, weight: float) -> int:
    """Samples that an epoch takes of a set: the nearest whole number to weight x stored ones, at least one of any."""
    return max(1, round(Fraction(weight) * num_stored)) if num_stored else 0


def refuse_too_many(sets: Sequence[tuple[str, int, float]]) -> None:
    """Refuses a mixture whose epoch has more pieces than a rank can plan (about 100 bytes each).

    Args:
        sets: name, number of shards and weight of each set.

    Raises:
        DataError: there are too many; names the set that has most of them.
    """
    pieces = [(num_shards * max(1.0, weight), name, num_shards, weight) for name, num_shards, weight in sets]
    if sum(count for count, *_ in pieces) > MAX_PIECES:
        count, name, num_shards, weight = max(pieces)
        raise DataError(
            f"the data set {name} has {num_shards:,} shards with weight {weight:g}: an epoch would read "
            f"{count:,.0f} shards of it, {MAX_PIECES:,} in all can be planned: lower the weights (all by one factor "
            "changes only what is called an epoch), or pack the set into larger shards"
        )


@dataclass(frozen=True)
class Part:
    """A data set as the order sees it.

    Attributes:
        first_shard: number of its first shard; its shards follow each other.
        num_shards: how many it has.
        num_samples: samples that an epoch takes of it.
    """

    first_shard: int
    num_shards: int
    num_samples: int


@dataclass(frozen=True)
class Pieces:
    """Parts of shards in the order of an epoch, as columns of length p.

    Attributes:
        shards: number of the shard.
        firsts: its first sample that is taken.
        counts: how many samples are taken from there on.
    """

    shards: np.ndarray
    firsts: np.ndarray
    counts: np.ndarray


def natural_pieces(sizes: np.ndarray) -> Pieces:
    """Every shard whole, in the order of the index."""
    return Pieces(np.arange(len(sizes)), np.zeros(len(sizes), dtype=np.int64), sizes)


def epoch_pieces(sizes: np.ndarray, parts: Sequence[Part], *, seed: int, epoch: int) -> Pieces:
    """What an epoch reads, in its order before samples are mixed.

    Args:
        sizes: int64 (num_shards,): samples stored in each shard.
        parts: the data sets.
        seed: seed of the run.
        epoch: 0-based epoch.
    """
    of_sets = [_taken(sizes, part, seed=seed, number=number, epoch=epoch) for number, part in enumerate(parts)]
    if len(of_sets) == 1:
        return of_sets[0]
    places = [
        (np.arange(n) + generator(seed, _PLACE_STREAM, number, epoch).random(n)) / max(1, n)
        for number, n in enumerate(len(pieces.shards) for pieces in of_sets)
    ]
    order = np.argsort(np.concatenate(places), kind="stable")
    columns = zip(*((pieces.shards, pieces.firsts, pieces.counts) for pieces in of_sets), strict=True)
    return Pieces(*(np.concatenate(column)[order] for column in columns))


def _taken(sizes: np.ndarray, part: Part, *, seed: int, number: int, epoch: int) -> Pieces:
    """The pieces of samples [epoch m, (epoch + 1) m) in the endless sequence of a set."""
    own = sizes[part.first_shard : part.first_shard + part.num_shards]
    stored = int(own.sum())
    begin, end = epoch * part.num_samples, (epoch + 1) * part.num_samples
    found = []
    for turn in range(begin // stored, -(-end // stored)) if stored else ():
        shards = generator(seed, _PASS_STREAM, number, turn).permutation(part.num_shards)
        sizes_in_order = own[shards]
        ends = np.cumsum(sizes_in_order)
        starts = ends - sizes_in_order
        low, high = max(0, begin - turn * stored), min(stored, end - turn * stored)
        # An empty shard lies in no epoch; one that begins before `low` or ends after `high` is taken in part.
        inside = np.flatnonzero((ends > low) & (starts < high) & (sizes_in_order > 0))
        firsts = np.maximum(low - starts[inside], 0)
        counts = np.minimum(high - starts[inside], sizes_in_order[inside]) - firsts
        found.append(Pieces(part.first_shard + shards[inside], firsts, counts))
    if len(found) == 1:
        return found[0]
    empty = np.zeros(0, dtype=np.int64)
    return Pieces(
        np.concatenate([empty, *(pieces.shards for pieces in found)]),
        np.concatenate([empty, *(pieces.firsts for pieces in found)]),
        np.concatenate([empty, *(pieces.counts for pieces in found)]),
    )
