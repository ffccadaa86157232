"""Samples that are passed over: how they are counted, said, and when they are too many."""

from __future__ import annotations

import logging
import math
import re
from collections import Counter

from clap_zero.data.batch import Batch, EvalBatch, LoaderPlan
from clap_zero.errors import DataError, one_line

_logger = logging.getLogger(__name__)

BLACKLISTED = "blacklisted"
"""The reason of a sample that the user asked to leave out: replaced and counted as an unusable one, never a fault."""

MIN_BAD = 16
"""So many bad samples of an epoch do not end a run, where they are less than half of them."""
MIN_JUDGED = 1_000
"""Slots that a rank has read before it judges its own data where there are others."""
_EARLY_SAMPLES = 10_000
_DEVIATIONS = 6
_SKIPS_SHOWN = 20
_LATEST_KEPT = 10
_REMEMBERED = 50_000
_KINDS_KEPT = 500
_EQUAL_WINDOW = 1_000
_MANY_EQUAL = 0.1


def reason_kind(reason: str) -> str:
    """What is alike in the reasons of equal faults, to count by: no numbers, no details, nothing in brackets."""
    kind = re.split(r": | \(", reason, maxsplit=1)[0]
    return re.sub(r"\d[\d.,]*(?:[eE][+-]?\d+)?", "N", kind)


def count_kind(counts: Counter[str], kind: str, number: int = 1) -> int:
    """Adds to the count of a kind of reason. There may be very many kinds: the rarest are counted together.

    Returns:
        The count that it was added to.
    """
    is_kept = kind in counts or kind == BLACKLISTED or len(counts) < _KINDS_KEPT
    counts[kind if is_kept else "other reasons"] += number
    return counts[kind if is_kept else "other reasons"]


def bad_limit(num_slots: int, *, num_samples: int, max_bad_fraction: float, largest_shard: int = 1) -> float:
    """Most unusable samples that all ranks may have met after `num_slots` slots of an epoch; one more ends the run.

    That is `max_bad_fraction` of the epoch, in whatever order its samples come, and never below 16 or, with few
    samples, below half of them: two bad files among thirty do not end a run. Long before an epoch ends it is the
    share of the slots so far, of at least 10,000, and what chance may add to it. Faults come by whole shards and a
    random order of these, so with `f` unusable ones expected and shards of `m` samples that is
    `6 sqrt(m f) + 6^2 m / 3` (Bernstein's inequality, also for draws without replacement: 1 epoch in 10^7 exceeds it).

    Args:
        num_slots: slots of the epoch that all ranks have read.
        num_samples: samples of an epoch, over all ranks.
        max_bad_fraction: `data.max_bad_fraction`.
        largest_shard: samples of the largest shard, which may all be unusable; `num_samples` where shards do not come
            in random order: then only the share of the whole epoch counts.
    """
    expected = max_bad_fraction * max(num_slots, min(num_samples, _EARLY_SAMPLES))
    by_chance = _DEVIATIONS * math.sqrt(largest_shard * expected) + _DEVIATIONS**2 / 3 * largest_shard
    return max(min(MIN_BAD, num_samples / 2), min(max_bad_fraction * num_samples, expected + by_chance))


def rank_limit(num_slots: int, *, max_bad_fraction: float, shard_slots: float = 1) -> float:
    """Most unusable samples that one of several ranks may have met by itself: half of at least 1,000 slots.

    The share of a single rank is chance, or the fault of its machine. Whether there are too many is for all ranks
    together to say (`bad_limit`); this ends a run only where a rank can read next to nothing.

    Args:
        num_slots: slots of the epoch that the rank has read.
        max_bad_fraction: `data.max_bad_fraction`.
        shard_slots: the rank's part of the largest shard; four of these are judged together at least.
    """
    return max(0.5, max_bad_fraction) * max(num_slots, MIN_JUDGED, 4 * shard_slots)


class EpochFaults:
    """Unusable samples of an epoch: how many of how many, their reasons, and the latest of them."""

    def __init__(self) -> None:
        self.epoch, self.num_slots, self.num_bad = -1, 0, 0
        self.reasons: Counter[str] = Counter()
        self.latest: list[str] = []

    def begin(self, epoch: int) -> None:
        """Forgets another epoch."""
        if epoch != self.epoch:
            self.epoch, self.num_slots, self.num_bad = epoch, 0, 0
            self.reasons.clear()
            self.latest = []

    def keep(self, key: str, reason: str) -> None:
        """Remembers the reason of an unusable sample. `num_bad` is the caller's to count: of one rank, or of all."""
        count_kind(self.reasons, reason_kind(reason))
        self.latest = [*self.latest[1 - _LATEST_KEPT :], one_line(f"{key} ({reason})")]

    def error(self, where: str, max_bad_fraction: float) -> DataError:
        """What ends the run.

        Args:
            where: whose samples these are.
            max_bad_fraction: `data.max_bad_fraction`.
        """
        reasons = ", ".join(f"{reason} ({count})" for reason, count in self.reasons.most_common(8))
        return DataError(
            f"{self.num_bad} of {self.num_slots} samples of epoch {self.epoch} are unusable {where}, more than "
            f"data.max_bad_fraction {max_bad_fraction} allows: {reasons}; the latest: " + "; ".join(self.latest)
        )


class SkipWatch:
    """Looks at each batch of a rank: says what was skipped or is odd, and ends a run that cannot go on.

    A rank that is alone ends it at more than `bad_limit`, one of several at more than `rank_limit`; for all together
    there is `SkipLimit`.
    """

    def __init__(self, plan: LoaderPlan, num_samples: int, *, largest_shard: int = 1) -> None:
        """Args:
        plan: what the rank reads.
        num_samples: samples of an epoch, over all ranks.
        largest_shard: see `bad_limit`.
        """
        self._plan, self._num_samples, self._largest_shard = plan, num_samples, largest_shard
        self._faults = EpochFaults()
        self._named, self._noted = _Known(), _Known()
        self._said: set[str] = set()
        self._kinds: Counter[str] = Counter()
        self._captions, self._equal, self._equal_said = 0, 0, False

    def see(self, batch: Batch | EvalBatch) -> None:
        """Takes note of a batch.

        Raises:
            DataError: too many samples of the epoch were unusable; with their reasons and the latest of them.
        """
        faults = self._faults
        faults.begin(batch.position.epoch if isinstance(batch, Batch) else 0)
        faults.num_slots += len(batch)
        for note in batch.notes:
            self._note(note)
        if batch.num_truncated:
            self._say_once(f"captions with more than {self._plan.max_caption_tokens} tokens are cut")
        if isinstance(batch, Batch):
            self._see_equal(batch)
        for key, reason in batch.skipped:
            if reason == BLACKLISTED:
                self._say_once("samples that data.blacklist names are left out, others take their places")
                continue
            faults.num_bad += 1
            faults.keep(key, reason)
            self._name(key, reason)
        if faults.num_bad > self._limit(faults.num_slots):
            raise faults.error(f"on rank {self._plan.rank}", self._plan.max_bad_fraction)

    def _limit(self, num_slots: int) -> float:
        fraction = self._plan.max_bad_fraction
        if self._plan.world_size > 1:
            shard_slots = self._largest_shard / self._plan.world_size
            return rank_limit(num_slots, max_bad_fraction=fraction, shard_slots=shard_slots)
        return bad_limit(
            num_slots, num_samples=self._num_samples, max_bad_fraction=fraction, largest_shard=self._largest_shard
        )

    def _name(self, key: str, reason: str) -> None:
        """Names a sample once; of very many only some here, all of them in the run's record of skipped samples."""
        if self._named.add(key) and _is_shown(self._named.num_seen):
            number, named = self._named.num_seen, one_line(f"{key} ({reason})")
            _logger.warning("rank %d skipped sample %d: %s", self._plan.rank, number, named)

    def _note(self, note: str) -> None:
        """Says what a worker noticed of a sample or shard, once; of many notes of a kind only some."""
        if not self._noted.add(note):
            return
        kind = reason_kind(note.partition(": ")[2] or note)
        number = count_kind(self._kinds, kind)
        if _is_shown(number):
            such = "" if number <= _SKIPS_SHOWN else f" ({number} such)"
            _logger.warning("rank %d: %s%s", self._plan.rank, one_line(note), such)

    def _see_equal(self, batch: Batch) -> None:
        """Pairs with equal captions are no good negatives of each other: said once where they are many."""
        self._captions += len(batch)
        self._equal += num_equal(batch)
        if self._captions >= _EQUAL_WINDOW:
            if self._equal > _MANY_EQUAL * self._captions and not self._equal_said:
                self._equal_said = True
                _logger.warning(
                    "rank %d: %d of %d captions equal another one of their micro batch: objective.positives says what "
                    "becomes of such pairs; more varied captions would teach more",
                    self._plan.rank,
                    self._equal,
                    self._captions,
                )
            self._captions, self._equal = 0, 0

    def _say_once(self, note: str) -> None:
        if note not in self._said:
            self._said.add(note)
            _logger.warning("rank %d: %s", self._plan.rank, note)


class _Known:
    """Which texts have come before. Those beyond the first many are always taken for new ones: memory is bounded."""

    def __init__(self) -> None:
        self._hashes: set[int] = set()
        self.num_seen = 0

    def add(self, text: str) -> bool:
        """Whether the text is new."""
        number = hash(text)
        if number in self._hashes:
            return False
        self.num_seen += 1
        if len(self._hashes) < _REMEMBERED:
            self._hashes.add(number)
        return True


def _is_shown(number: int) -> bool:
    """The first few of many, then every doubling."""
    return number <= _SKIPS_SHOWN or number & (number - 1) == 0


def num_equal(batch: Batch) -> int:
    """Captions of a micro batch that are said by an earlier one of it already."""
    return len(batch) - len(set(batch.caption_ids.tolist()))
