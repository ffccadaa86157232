"""How long a run took to start, by part."""

from __future__ import annotations

import time

from clap_zero import phases

PARTS = ("imports", "rendezvous", "preflight", "model", "engine")


def told_start() -> str:
    """Seconds from the start of this process to the first step, as one line. Call it once, before the first step.

    `own` is the rest: the interpreter itself, the command line, and what joins the parts of the run.
    """
    spent = phases.spent()
    total = sum(spent.values())
    own = total - sum(spent.get(part, 0.0) for part in PARTS)
    parts = ", ".join(f"{part} {spent.get(part, 0.0):.1f}" for part in PARTS)
    return f"start-up {total:.1f} s: {parts}, own {own:.1f}"


def told_first_step() -> str:
    """Seconds from the start of this process to the end of its first step, as one line."""
    spent = phases.spent()
    took = {
        "start-up": sum(spent.get(part, 0.0) for part in (*PARTS, "start", "checkpoint")),
        "evaluation": spent.get("evaluation", 0.0),
        "hooks": spent.get("metrics", 0.0),
        "data": spent.get("data", 0.0),
        "step": sum(spent.get(part, 0.0) for part in ("forward", "backward", "optimizer")),
    }
    parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in took.items())
    return f"first step after {time.monotonic() - phases.BEGAN:.1f} s: {parts}"
