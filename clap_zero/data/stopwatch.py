"""Where a loader's time goes, by stage, and what to do about the stage that takes most of it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

STAGES = ("download", "read", "decode", "resample", "captions", "tokenise", "collate")
"""What a worker does for a batch, in order: waiting for a remote source, reading bytes of a shard, decoding,
resampling, choosing captions (blacklist included), tokenising, joining samples to a batch."""

_LOADER = "more --data.workers"
ADVICE = {
    "download": "a copy or a cache (--data.cache_dir) nearer to the machine, or more --data.workers",
    "read": "a faster or local disk, or an index of the shards' samples (clap-zero check writes it)",
    "decode": f"{_LOADER}, or clap-zero pack --store logmel",
    "resample": f"clap-zero pack, which stores the model's own rate, or {_LOADER}",
    "captions": _LOADER,
    "tokenise": _LOADER,
    "collate": _LOADER,
}
"""What helps where a stage is the limit."""


class Stopwatch:
    """Seconds of one loader process by stage; `take` gives them and begins anew."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(STAGES, 0.0)

    @contextmanager
    def measure(self, stage: str) -> Iterator[None]:
        """Adds the time of the block to a stage, also when it raises."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] += time.perf_counter() - started

    def take(self) -> dict[str, float]:
        """The seconds since the last call."""
        taken, self.seconds = self.seconds, dict.fromkeys(STAGES, 0.0)
        return taken


def describe_wait(wait_share: float, seconds: Mapping[str, float]) -> str:
    """One line about steps that wait for data: how much, which stage is the limit, and the way out.

    Args:
        wait_share: part of the steps' time that they waited, 0 to 1.
        seconds: time of the loaders by stage.
    """
    line = f"steps wait {wait_share:.0%} of the time for data"
    total = sum(seconds.values())
    if total <= 0:
        return line
    stage = max(STAGES, key=lambda name: seconds.get(name, 0.0))
    return f"{line}; of the loader's time {stage} takes {seconds[stage] / total:.0%}: {ADVICE[stage]}"
