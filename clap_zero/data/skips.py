"""Samples that are passed over: how they are counted, said, and when they are too many."""

from __future__ import annotations

import logging
import re
from collections import Counter

from clap_zero.data.batch import Batch, EvalBatch, LoaderPlan
from clap_zero.errors import DataError

_logger = logging.getLogger(__name__)

BLACKLISTED = "blacklisted"
"""The reason of a sample that the user asked to leave out: replaced and counted as an unusable one, never a fault."""

MIN_BAD = 16
"""So many bad samples of an epoch on a rank do not end a run, where they are less than half of its early ones."""
_EARLY_SAMPLES = 10_000
_SKIPS_SHOWN = 20
_LATEST_KEPT = 10
_KEYS_REMEMBERED = 100_000
_EQUAL_WINDOW = 1_000
_MANY_EQUAL = 0.1


def reason_kind(reason: str) -> str:
    """What is alike in the reasons of equal faults, to count by: no numbers, no details, nothing in brackets."""
    kind = re.split(r": | \(", reason, maxsplit=1)[0]
    return re.sub(r"\d[\d.,]*(?:[eE][+-]?\d+)?", "N", kind)


def bad_limit(num_slots: int, *, num_samples: int, world_size: int, max_bad_fraction: float) -> float:
    """Most unusable samples that a rank may have met after `num_slots` slots of an epoch; one more ends the run.

    That is `max_bad_fraction` of the slots so far, of at least the rank's share of 10,000 samples (or of the epoch,
    where that is smaller), and never below 16 or, with few samples, below half of them: one broken shard among many, or
    two bad files among thirty, do not end a run; more bad ones than good ones do.

    Args:
        num_slots: slots of the epoch that the rank has read.
        num_samples: samples of an epoch, over all ranks.
        world_size: number of ranks.
        max_bad_fraction: `data.max_bad_fraction`.
    """
    num_early = min(num_samples, _EARLY_SAMPLES) / world_size
    return max(min(MIN_BAD, num_early / 2), max_bad_fraction * max(num_slots, num_early))


class SkipWatch:
    """Looks at each batch of a rank: says what was skipped or is odd, and ends the run at more than `bad_limit`."""

    def __init__(self, plan: LoaderPlan, num_samples: int) -> None:
        self._plan, self._num_samples = plan, num_samples
        self._epoch, self._slots, self._bad = -1, 0, 0
        self._reasons: Counter[str] = Counter()
        self._latest: list[str] = []
        self._said: set[str] = set()
        self._named: set[str] = set()
        self._captions, self._equal, self._equal_said = 0, 0, False

    def see(self, batch: Batch | EvalBatch) -> None:
        """Takes note of a batch.

        Raises:
            DataError: too many samples of the epoch were unusable; with their reasons and the latest of them.
        """
        epoch = batch.position.epoch if isinstance(batch, Batch) else 0
        if epoch != self._epoch:
            self._epoch, self._slots, self._bad = epoch, 0, 0
            self._reasons.clear()
        self._slots += len(batch)
        for note in batch.notes:
            self._say_once(note)
        if batch.num_truncated:
            self._say_once(f"captions with more than {self._plan.max_caption_tokens} tokens are cut")
        if isinstance(batch, Batch):
            self._see_equal(batch)
        for key, reason in batch.skipped:
            if reason == BLACKLISTED:
                self._say_once("samples that data.blacklist names are left out, others take their places")
                continue
            self._bad += 1
            self._reasons[reason_kind(reason)] += 1
            self._latest = [*self._latest[1 - _LATEST_KEPT :], f"{key} ({reason})"]
            self._name(key, reason)
        self._check_limit()

    def _name(self, key: str, reason: str) -> None:
        """Names a sample once; of very many only some here, all of them in the run's record of skipped samples."""
        if key in self._named or len(self._named) >= _KEYS_REMEMBERED:
            return
        self._named.add(key)
        number = len(self._named)
        if number <= _SKIPS_SHOWN or number & (number - 1) == 0:
            _logger.warning("rank %d skipped sample %d: %s (%s)", self._plan.rank, number, key, reason)

    def _check_limit(self) -> None:
        limit = bad_limit(
            self._slots,
            num_samples=self._num_samples,
            world_size=self._plan.world_size,
            max_bad_fraction=self._plan.max_bad_fraction,
        )
        if self._bad > limit:
            reasons = ", ".join(f"{reason} ({count})" for reason, count in self._reasons.most_common(8))
            raise DataError(
                f"{self._bad} of {self._slots} samples of epoch {self._epoch} are unusable on rank {self._plan.rank}, "
                f"more than data.max_bad_fraction {self._plan.max_bad_fraction} allows: {reasons}; the latest: "
                + "; ".join(self._latest)
            )

    def _see_equal(self, batch: Batch) -> None:
        """Equal captions are negatives of each other, in spite of what they say: said once where they are many."""
        self._captions += len(batch)
        self._equal += num_equal(batch)
        if self._captions >= _EQUAL_WINDOW:
            if self._equal > _MANY_EQUAL * self._captions and not self._equal_said:
                self._equal_said = True
                _logger.warning(
                    "rank %d: %d of %d captions equal another one of their micro batch: each is a negative of the "
                    "other's clip, which holds the loss up; more varied captions avoid it",
                    self._plan.rank,
                    self._equal,
                    self._captions,
                )
            self._captions, self._equal = 0, 0

    def _say_once(self, note: str) -> None:
        if note not in self._said:
            self._said.add(note)
            _logger.warning("rank %d: %s", self._plan.rank, note)


def num_equal(batch: Batch) -> int:
    """Captions of a micro batch that are said by an earlier one of it already."""
    return len(batch) - len(set(batch.caption_ids.tolist()))
