"""What a pack did: for people, and as a part's contribution to the whole."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clap_zero.errors import one_line

REJECTED_FILE = "rejected.jsonl"
_ROW = re.compile(r"^(?:\S+ )?row \d+: ")


@dataclass(frozen=True)
class SplitReport:
    """What a split became: its directory, pairs, tars, rejected items, and the duration of its audio in seconds."""

    directory: Path
    num_pairs: int
    num_shards: int
    num_rejected: int
    duration_s: float


@dataclass
class PackReport:
    """What was packed and what was not. Every item is packed or rejected.

    Attributes:
        splits: by name.
        num_rows: rows of the source.
        num_items: clips of the source: rows that name the same file are one.
        num_duplicates: rows that repeat an earlier one.
        num_listed: clips that this pack had to pack; for a part those of its share.
        reasons: how often each reason for a rejection occurred.
        extra: files beside the source that nothing names; a part lists them only if it is the first.
        num_cut: clips that were longer than the limit.
        num_silent: clips whose samples are all zero.
        damaged: name and fault of each file of which only the readable part was kept.
        part: "3/64" where this is a part of a pack.
        notes: what else should be known.
    """

    splits: dict[str, SplitReport] = field(default_factory=dict)
    num_rows: int = 0
    num_items: int = 0
    num_duplicates: int = 0
    num_listed: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    extra: list[str] = field(default_factory=list)
    num_cut: int = 0
    num_silent: int = 0
    damaged: list[str] = field(default_factory=list)
    part: str | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def num_pairs(self) -> int:
        """Pairs packed."""
        return sum(split.num_pairs for split in self.splits.values())

    @property
    def num_rejected(self) -> int:
        """Items that were not packed."""
        return sum(self.reasons.values())

    def count_reason(self, reason: str) -> None:
        """Counts a rejection: "row 7: no caption" and "row 9: no caption" are one kind."""
        self.reasons[_ROW.sub("", reason)] += 1

    def nothing_packed(self) -> str:
        """Says why there is no pair."""
        reasons = "; ".join(f"{reason} ({count})" for reason, count in self.reasons.most_common(5))
        return one_line(f"0 usable of {self.num_rows} samples, nothing was packed: {reasons}")

    def numbers(self) -> dict[str, Any]:
        """What a part hands on, as JSON."""
        names = ("num_rows", "num_items", "num_duplicates", "num_listed", "extra", "num_cut", "num_silent", "damaged")
        return {**{name: getattr(self, name) for name in names}, "reasons": dict(self.reasons)}

    def add_part(self, numbers: dict[str, Any]) -> None:
        """Adds what `numbers` gave for a part; every part has the same source."""
        for name in ("num_rows", "num_items", "num_duplicates"):
            setattr(self, name, numbers[name])
        for name in ("num_listed", "extra", "num_cut", "num_silent", "damaged"):
            setattr(self, name, getattr(self, name) + numbers[name])
        self.reasons.update(numbers["reasons"])

    def lines(self) -> list[str]:
        """The report for people, a line each."""
        lines = [
            f"{name}: {split.num_pairs} pairs, {split.duration_s:.0f} s, in {split.num_shards} shards in "
            f"{split.directory}"
            + (f"; {split.num_rejected} rejected, see {REJECTED_FILE}" if split.num_rejected else "")
            for name, split in self.splits.items()
        ]
        if self.part is not None:
            lines.append(
                f"part {self.part}: {self.num_listed} of {self.num_items} clips: {self.num_pairs} packed, "
                f"{self.num_rejected} rejected"
            )
        else:
            merged = self.num_rows - self.num_items - self.num_duplicates
            lines.append(
                f"{self.num_rows} rows: {self.num_pairs} packed, {self.num_rejected} rejected, "
                f"{self.num_duplicates} said twice" + (f", {merged} with more captions of a clip" if merged else "")
            )
        lines += [f"rejected {count}: {reason}" for reason, count in self.reasons.most_common(20)]
        if self.extra:
            lines.append(f"{len(self.extra)} files beside them are not listed: {', '.join(self.extra[:5])}")
        if self.num_cut:
            lines.append(f"{self.num_cut} clips were longer than --max-seconds and lost their end")
        if self.damaged:
            shown = "; ".join(self.damaged[:5]) + ("; ..." if len(self.damaged) > 5 else "")
            lines.append(f"{len(self.damaged)} damaged files were kept as far as they can be read: {shown}")
        if self.num_silent:
            lines.append(f"{self.num_silent} clips are silent (all samples zero); --drop-silent leaves them out")
        return [one_line(line) for line in [*lines, *self.notes]]
