"""All shards of a data setting: where they are, how many samples each has, and which data set each belongs to.

Counts in `sizes.json` are the counts of record; shards without one are counted here, before anything is read. The shard
part of a sample's key is relative to the data root, the directory above the split: `train/0.tar`; further directories
are put before it only where two splits would get equal names. find.py says what a pattern may be.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from clap_zero.config.data import DataSection, DataSetSection
from clap_zero.data.columns import Names, pack_integers, unpack_integers
from clap_zero.data.count import MAX_COUNTED, Counted, compare, count_all, nothing_usable
from clap_zero.data.directories import Place, last_parts, name_places, prefix_parts, refuse_doubles
from clap_zero.data.find import SPANS_FILE, UNKNOWN, Found, find_shards
from clap_zero.data.mixture import refuse_too_many, samples_per_epoch
from clap_zero.data.partition import EpochOrder
from clap_zero.data.patterns import spread
from clap_zero.data.places import ReadPolicy, is_remote, shown
from clap_zero.data.sets import DataSet, NamedSet, name_sets
from clap_zero.data.shards import Shard
from clap_zero.data.sizes import SIZES_FILE
from clap_zero.data.spans import SpansRef
from clap_zero.errors import DataError

_CHECKED_SHARDS = 8


@dataclass(frozen=True, eq=False)
class ShardIndex:
    """All shards of a data setting, in a fixed order, as columns: a million shards are usual.

    Attributes:
        places: the directories.
        place_ids: int64 (num_shards,): the directory of each shard.
        names: name of each shard in its directory.
        sizes: int64 (num_shards,): samples of each shard.
        rows: int64 (num_shards,): row of its first sample in its directory's spans.npy; -1 where there is none.
        sets: the data sets, in the order of their shards.
        prefix_parts: number of trailing parts of a path that make its key prefix.
    """

    places: tuple[Place, ...]
    place_ids: np.ndarray
    names: Names
    sizes: np.ndarray
    rows: np.ndarray
    sets: tuple[DataSet, ...]
    prefix_parts: int = 2

    @property
    def num_shards(self) -> int:
        """Shards of all sets."""
        return len(self.sizes)

    @cached_property
    def num_stored(self) -> int:
        """Samples in all shards, each counted once: what evaluation sees."""
        return int(self.sizes.sum())

    @property
    def num_samples(self) -> int:
        """Samples of a training epoch, weights counted."""
        return sum(one.num_samples for one in self.sets)

    def num_epoch(self, *, training: bool) -> int:
        """Samples of an epoch of training, or of one evaluation."""
        return self.num_samples if training else self.num_stored

    @cached_property
    def fingerprint(self) -> str:
        """Hash over names, counts, sets and weights: equal for data that is read alike, wherever it lies."""
        digest = hashlib.sha256()
        digest.update(repr([self._prefix(place) for place in self.places]).encode("utf-8", "surrogateescape"))
        digest.update(self.names.blob)
        for column in (self.names.ends, self.place_ids, self.sizes):
            digest.update(column.astype("<i8").tobytes())
        digest.update(repr([(one.num_shards, one.num_samples) for one in self.sets]).encode())
        return digest.hexdigest()[:16]

    def path(self, number: int) -> str:
        """Absolute path, or URL, of shard `number`."""
        place = self.places[self.place_ids[number]]
        return f"{place.head}{self.names[number]}{place.tail}"

    def key_prefix(self, number: int) -> str:
        """The first part of the keys of shard `number`'s samples."""
        place = self.places[self.place_ids[number]]
        return last_parts(place.label + self.names[number], self.prefix_parts)

    def set_id(self, number: int) -> int:
        """Number of the data set of shard `number`."""
        return int(np.searchsorted(self._last_shards, number, side="right"))

    def shard(self, number: int) -> Shard:
        """Shard `number` as an object."""
        place, row = self.places[self.place_ids[number]], int(self.rows[number])
        spans = SpansRef(f"{place.head}{SPANS_FILE}{place.tail}", row, place.num_rows) if row >= 0 else None
        size, set_id = int(self.sizes[number]), self.set_id(number)
        return Shard(self.path(number), self.key_prefix(number), size, set_id, spans)

    def order(self, *, seed: int, epoch: int, shuffle_shards: int = 16, shuffle: bool = True) -> EpochOrder:
        """The sequence of all samples in one epoch; without shuffling, every stored sample once, for evaluation."""
        parts = [one.part for one in self.sets]
        return EpochOrder(
            self.sizes, seed=seed, epoch=epoch, shuffle_shards=shuffle_shards, shuffle=shuffle, parts=parts
        )

    @cached_property
    def _last_shards(self) -> np.ndarray:
        return np.array([one.first_shard + one.num_shards for one in self.sets])

    def _prefix(self, place: Place) -> str:
        return last_parts(place.label, self.prefix_parts)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        columns = tuple(pack_integers(column) for column in (self.place_ids, self.sizes, self.rows))
        return _unpack_index, (self.places, self.names, columns, self.sets, self.prefix_parts)


def _unpack_index(
    places: tuple[Place, ...],
    names: Names,
    columns: tuple[bytes, ...],
    sets: tuple[DataSet, ...],
    prefix_parts: int,
) -> ShardIndex:
    place_ids, sizes, rows = map(unpack_integers, columns)
    return ShardIndex(places, place_ids, names, sizes, rows, sets, prefix_parts)


def load_index(
    entries: Sequence[str | DataSetSection],
    *,
    policy: ReadPolicy | None = None,
    caption_key: str = "text",
    max_counted: int | None = MAX_COUNTED,
) -> ShardIndex:
    """Finds all shards of a data setting and their counts.

    A few local shards are compared with their counts; what differs is logged as a warning.

    Args:
        entries: patterns (see find.py) and data sets.
        policy: how remote places are read, and what a missing shard means.
        caption_key: key of the captions where a set has none of its own.
        max_counted: more shards of a pattern without counts are refused; None: as many as there are.

    Raises:
        DataError: a shard is missing or named twice, a count is not readable, or no sample can be used.
    """
    policy = policy or ReadPolicy()
    if not entries:
        raise DataError("no data given: name split directories or tars, for example data/sounds/train")
    asked = name_sets(entries, caption_key)
    seen = Counted()
    found = [
        [_counted(part, policy, seen, max_counted) for p in one.patterns for part in find_shards(p, policy)]
        for one in asked
    ]
    index = _assembled(asked, found)
    if index.num_stored == 0:
        patterns = [pattern for one in asked for pattern in one.patterns]
        if index.num_shards and seen.num_shards == 0:
            raise DataError(
                f"{', '.join(map(shown, patterns))}: its {SIZES_FILE} counts no pair: remove it to have the shards "
                "counted"
            )
        raise DataError(nothing_usable(patterns, seen))
    empty = [one.name for one in index.sets if one.num_stored == 0]
    if empty and policy.missing != "skip":
        raise DataError(f"the data set {empty[0]} has no usable pair: take it out of the setting, or check its shards")
    _compare_some(index, policy)
    return index


def index_of(entries: Sequence[str | DataSetSection], data: DataSection) -> ShardIndex:
    """`load_index` with the settings of a run: for data.train, data.val, or other shards in their place."""
    return load_index(entries, policy=policy_of(data), caption_key=data.caption_key)


def policy_of(data: DataSection) -> ReadPolicy:
    """How a run reads shards."""
    return ReadPolicy(
        cache_dir=data.cache_dir,
        cache_bytes=data.cache_bytes,
        timeout_s=data.remote_timeout_s,
        retries=data.remote_retries,
        allow_pipe=data.allow_pipe,
        missing=data.missing_shards,
    )


def _counted(found: Found, policy: ReadPolicy, seen: Counted, max_counted: int | None) -> Found:
    """The same shards, each with a count; without those that cannot be read where they are to be skipped."""
    unknown = np.flatnonzero(found.sizes == UNKNOWN)
    if len(unknown) == 0:
        return found
    paths = [found.path(row) for row in unknown.tolist()]
    counts = count_all(paths, policy=policy, seen=seen, max_shards=max_counted)
    sizes = found.sizes.copy()
    sizes[unknown] = [UNKNOWN if count is None else count for count in counts]
    return replace(found, sizes=sizes).only(np.flatnonzero(sizes >= 0))


def _assembled(asked: Sequence[NamedSet], found: Sequence[Sequence[Found]]) -> ShardIndex:
    every = [part for parts in found for part in parts]
    refuse_doubles(every)
    places = name_places(every)
    numbers = {where: number for number, where in enumerate(places)}
    sets, first = [], 0
    for one, parts in zip(asked, found, strict=True):
        num_shards = sum(len(part.names) for part in parts)
        stored = sum(int(part.sizes.sum()) for part in parts)
        taken = samples_per_epoch(stored, one.weight)
        sets.append(DataSet(one.name, one.weight, one.rule, first, num_shards, stored, taken))
        first += num_shards
    refuse_too_many([(one.name, one.num_shards, one.weight) for one in sets])
    return ShardIndex(
        places=tuple(places.values()),
        place_ids=_joined(np.full(len(part.names), numbers[part.head, part.tail]) for part in every),
        names=Names.of(part.names for part in every),
        sizes=_joined(part.sizes for part in every),
        rows=_joined(np.full(len(part.names), UNKNOWN) if part.rows is None else part.rows for part in every),
        sets=tuple(sets),
        prefix_parts=prefix_parts({place.label for place in places.values()}),
    )


def _joined(columns: Iterable[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype=np.int64), *columns])


def _compare_some(index: ShardIndex, policy: ReadPolicy) -> None:
    """Compares a few local shards that have a count of record with it, spread over the index."""
    local = [number for number, place in enumerate(index.places) if not is_remote(place.head)]
    rows = np.flatnonzero(np.isin(index.place_ids, local) & (index.sizes > 0))
    asked = spread(range(len(rows)), _CHECKED_SHARDS)
    # As many as may be counted: with more shards than that, all of those without a pair, the setting is wrong.
    others = np.setdiff1d(rows[spread(range(len(rows)), MAX_COUNTED)], rows[asked])
    some, rest = (map(index.shard, numbers.tolist()) for numbers in (rows[asked], others))
    compare(list(some), rest, policy=policy)
