"""Where shards lie, and how remote ones are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ReadPolicy:
    """How remote shards are read.

    Attributes:
        cache_dir: where downloaded shards are kept; None: ~/.cache/clap_zero/shards.
        cache_bytes: most bytes that are kept there.
        timeout_s: seconds without a byte after which a source counts as stalled.
        retries: how often a failed read is tried again.
        allow_pipe: whether `pipe:` commands may be run.
        missing: what a shard that cannot be read does: "stop" ends the run, "skip" makes its samples bad ones.
    """

    cache_dir: str | None = None
    cache_bytes: int = 100_000_000_000
    timeout_s: float = 60.0
    retries: int = 4
    allow_pipe: bool = False
    missing: Literal["stop", "skip"] = "stop"
