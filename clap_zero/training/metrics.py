"""What is measured in a step, and how the ranks' figures become one line."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import torch

from clap_zero.distributed import collectives
from clap_zero.precision import wide
from clap_zero.training.own_time import slowest_rank


@dataclass(frozen=True)
class LocalFigures:
    """What one rank measured in one step.

    Attributes:
        loss: Mean over the rank's share of the global batch.
        step_time_s: Wall time of the step, waiting for data included.
        data_wait_s: Seconds of it that the step waited for the loader.
        peak_memory_bytes: Largest memory so far: device memory, resident set size on CPU.
        num_skipped: Samples of the step that could not be used and were replaced.
        stop: 1 if a signal asked this rank to stop.
        loader_s: Seconds that the rank's loader spent on the step's batches, in the order of STAGES.
        objective: What people watch of the objective over the rank's pairs, in the order of ObjectiveFigures.
        own_s: Seconds without waits for other ranks, in the order of OWN_PHASES.
    """

    loss: float
    step_time_s: float
    data_wait_s: float
    peak_memory_bytes: float
    num_skipped: float
    stop: float
    loader_s: tuple[float, ...]
    objective: tuple[float, ...]
    own_s: tuple[float, ...]


def gather_figures(figures: LocalFigures, *, device: torch.device) -> list[LocalFigures]:
    """Exchange the figures of a step.

    Collective: all ranks must call.

    Returns:
        The figures of all ranks, by rank.
    """
    # float64: a peak of 100 GB has to survive next to a loss. Devices without it take float32, exact to 2^24 relative.
    several = ("loader_s", "objective", "own_s")
    names = [field.name for field in fields(figures) if field.name not in several]
    values = [*(getattr(figures, name) for name in names), *figures.loader_s, *figures.objective, *figures.own_s]
    mine = torch.tensor([values], dtype=wide(device), device=device)
    middle = len(names) + len(figures.loader_s)
    last = middle + len(figures.objective)
    return [
        LocalFigures(
            **dict(zip(names, row, strict=False)),
            loader_s=tuple(row[len(names) : middle]),
            objective=tuple(row[middle:last]),
            own_s=tuple(row[last:]),
        )
        for row in collectives.all_gather(mine).tolist()
    ]


def step_line(result: Any, *, attempt: int) -> dict[str, Any]:
    """The line of metrics.jsonl for one step (names and units: docs/run_directory.md)."""
    return {
        "step": result.step,
        "epoch": result.epoch,
        "samples": result.samples,
        "loss": result.loss if math.isfinite(result.loss) else None,
        "learning_rate": result.learning_rate,
        "grad_norm": result.grad_norm,
        "logit_scale": result.logit_scale,
        **({"logit_bias": result.logit_bias} if result.logit_bias is not None else {}),
        **({"logit_scale_t": result.logit_scale_t} if result.logit_scale_t is not None else {}),
        **{name: value if math.isfinite(value) else None for name, value in result.objective.items()},
        "samples_per_second": result.samples_per_second,
        "step_time_s": result.step_time_s,
        "data_wait_s": result.data_wait_s,
        "peak_memory_bytes": result.peak_memory_bytes,
        **slowest_rank(result.own_s, step_time_s=result.step_time_s),
        "attempt": attempt,
        **({"num_skipped": result.num_skipped} if result.num_skipped else {}),
        **({"loss_scale": result.loss_scale} if result.loss_scale is not None else {}),
    }
