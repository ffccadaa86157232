"""What a measurement of the loader says: figures, shares of the stages, and the way out of the limit."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from clap_zero.data.stopwatch import ADVICE

FEATURES = "features"
"""Name of the stage that the training device does; the others are the loader's."""
_LIMIT_SHARE = 0.35
"""A stage below this part of the time is not called the limit by itself: the work is spread."""

_FEATURES_ADVICE = "they are computed on the training device, not by the loader: a GPU takes them off this CPU"


@dataclass(frozen=True)
class BenchReport:
    """What was measured.

    Attributes:
        num_shards: shards of the data set.
        num_samples: its pairs.
        workers: loader processes.
        micro_batch: pairs of a batch.
        truncation: kind of model.
        device: where features were computed; None without them.
        num_pairs: pairs read.
        wall_s: time that took, in seconds.
        cpu_s: CPU seconds of this process and of all workers in that time.
        stage_s: seconds by stage, summed over the processes; waiting counts.
        skipped: number of unusable samples by reason.
        bare_pairs_per_core_s: clips of the same data that soundfile alone decodes whole in a second of a core; None
            where it can decode none.
        mean_clip_s: mean length of those clips, in seconds; None without any.
    """

    num_shards: int
    num_samples: int
    workers: int
    micro_batch: int
    truncation: str
    device: str | None
    num_pairs: int
    wall_s: float
    cpu_s: float
    stage_s: dict[str, float]
    skipped: dict[str, int]
    bare_pairs_per_core_s: float | None
    mean_clip_s: float | None

    @property
    def pairs_per_s(self) -> float:
        """Pairs in a second of the clock."""
        return self.num_pairs / self.wall_s

    @property
    def pairs_per_core_s(self) -> float:
        """Pairs in a second of a core's work."""
        return self.num_pairs / max(self.cpu_s, 1e-9)

    @property
    def shares(self) -> dict[str, float]:
        """Part of each stage in the time of all, largest first."""
        total = sum(self.stage_s.values()) or 1.0
        return {name: spent / total for name, spent in sorted(self.stage_s.items(), key=lambda item: -item[1])}

    def record(self) -> dict[str, Any]:
        """All figures for a JSON file."""
        return {
            **asdict(self),
            "pairs_per_s": self.pairs_per_s,
            "pairs_per_core_s": self.pairs_per_core_s,
            "shares": self.shares,
            "verdict": self.verdict(),
        }

    def lines(self) -> list[str]:
        """The report for people."""
        where = "" if self.device is None else f", features on {self.device}"
        lines = [
            f"{self.num_shards} shards with {self.num_samples} pairs; workers {self.workers}, micro batch "
            f"{self.micro_batch}, {self.truncation}{where}: {self.num_pairs} pairs in {self.wall_s:.1f} s",
            f"pairs per second           {self.pairs_per_s:10.1f}",
            f"pairs per second per core  {self.pairs_per_core_s:10.1f}   ({self.cpu_s / self.wall_s:.2f} cores busy; "
            f"1,000 pairs a second take {1000 / self.pairs_per_core_s:.1f} cores)",
        ]
        if self.bare_pairs_per_core_s is None:
            lines.append("bare decoding                       -   (soundfile decodes none of these clips)")
        else:
            lines.append(
                f"bare decoding              {self.bare_pairs_per_core_s:10.1f}   (soundfile alone on the same clips, "
                f"whole, {self.mean_clip_s:.1f} s on average; the loader reaches "
                f"{self.pairs_per_core_s / self.bare_pairs_per_core_s:.0%} of it)"
            )
        lines.append(f"{'stage':12}{'share':>9}{'ms a pair':>12}")
        for name, share in self.shares.items():
            lines.append(f"{name:12}{share:9.1%}{1000 * self.stage_s[name] / self.num_pairs:12.3f}")
        if self.skipped:
            reasons = "; ".join(f"{reason} ({count})" for reason, count in Counter(self.skipped).most_common(5))
            lines.append(f"skipped {sum(self.skipped.values())} unusable samples: {reasons}")
        return [*lines, self.verdict()]

    def verdict(self) -> str:
        """One sentence: what is the limit, and the way out."""
        if not any(self.stage_s.values()):
            return "no stage took time that could be measured: take more --seconds"
        return self._limit().replace("--data.workers", "--workers").replace("--data.cache_dir", "--cache-dir")

    def _limit(self) -> str:
        """The sentence, with the settings as they are called in training."""
        name, share = next(iter(self.shares.items()))
        if share < _LIMIT_SHARE:
            return f"no stage is the limit by itself, {name} takes most ({share:.0%}): more --data.workers"
        return f"{name} is the limit, {share:.0%} of the time: {ADVICE.get(name, _FEATURES_ADVICE)}"
