"""Real multi-process tests on the CPU: run a function on N ranks that have joined one gloo group."""

from __future__ import annotations

from clap_zero.testing.pool import RankError, RankTimeout, run_distributed

__all__ = ["RankError", "RankTimeout", "run_distributed"]
