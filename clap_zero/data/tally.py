"""What batches of training are made of, counted: skipped samples by reason, data sets, cut and equal captions, time."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from clap_zero.data.batch import Batch
from clap_zero.data.skips import BLACKLISTED, count_kind, num_equal, reason_kind


@dataclass
class Tally:
    """Counts over some batches of one rank, or of all.

    Attributes:
        samples: samples that were trained on.
        skipped: samples whose places others took, by reason; blacklisted ones among them.
        sets: samples by number of their data set.
        truncated_captions: captions that were cut to data.max_caption_tokens.
        equal_captions: captions that an earlier one of their micro batch says already.
        loader_s: seconds that loaders spent, by stage.
    """

    samples: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    sets: Counter[int] = field(default_factory=Counter)
    truncated_captions: int = 0
    equal_captions: int = 0
    loader_s: dict[str, float] = field(default_factory=dict)

    def see(self, batch: Batch) -> None:
        """Adds a batch."""
        self.samples += len(batch)
        for _, reason in batch.skipped:
            count_kind(self.skipped, reason_kind(reason))
        self.sets.update(batch.set_ids.tolist())
        self.truncated_captions += batch.num_truncated
        self.equal_captions += num_equal(batch)
        self._add_seconds(batch.seconds)

    def add(self, other: Tally) -> None:
        """Adds what another one has counted."""
        self.samples += other.samples
        for kind, number in other.skipped.items():
            count_kind(self.skipped, kind, number)
        self.sets.update(other.sets)
        self.truncated_captions += other.truncated_captions
        self.equal_captions += other.equal_captions
        self._add_seconds(other.loader_s)

    def _add_seconds(self, seconds: dict[str, float]) -> None:
        for stage, value in seconds.items():
            self.loader_s[stage] = self.loader_s.get(stage, 0.0) + value

    @property
    def num_bad(self) -> int:
        """Unusable samples: all skipped ones but those that the user asked to leave out."""
        return self.skipped.total() - self.skipped[BLACKLISTED]
