"""The learning rate at a few steps, ours or DeepSpeed's, before anything runs."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from clap_zero.config.deepspeed import ResolvedDeepSpeed
from clap_zero.config.ds_torch_schedules import TORCH_SCHEDULES
from clap_zero.errors import ConfigError
from clap_zero.training.schedule import Schedule

MOST_STEPPED = 50_000
"""Steps of a schedule of torch that are gone through, about 10 us each; those have no rule for a single step."""


def told_schedule(resolved: ResolvedDeepSpeed) -> str:
    """One line: who sets the learning rate, and what it is at a few steps."""
    section, train = resolved.config.get("scheduler"), resolved.run.train
    total = resolved.total_steps
    if section is not None:
        kind, params = section["type"], section.get("params", {})
        # One step later than ours: the first step has the rate from which the warm-up starts.
        top = params.get("warmup_num_steps", params.get("cycle_first_step_size", 1)) + 2
        marks = _marks(total, top)
        rates: list[tuple[int, float | None]]
        if kind in TORCH_SCHEDULES:
            rates = [*torch_rates(kind, params, peak=train.learning_rate, steps=marks).items()]
        else:
            rates = [(step, scheduled_rate(kind, params, peak=train.learning_rate, step=step)) for step in marks]
        known = [f"{rate:.3g} at step {step}" for step, rate in rates if rate is not None]
        return f"schedule: {kind} of the DeepSpeed JSON" + (f", {', '.join(known)}" if known else "")
    if total is None and train.schedule == "cosine":
        return f"schedule: cosine to {train.min_learning_rate:g} after {train.warmup_steps} steps of warm-up to " + (
            f"{train.learning_rate:g}; its length is not known without --num-samples"
        )
    ours = Schedule(
        peak=train.learning_rate,
        minimum=train.min_learning_rate,
        warmup_steps=train.warmup_steps,
        max_steps=total or train.warmup_steps,
        kind=train.schedule,
    )
    marks = _marks(total, train.warmup_steps)
    shown = [f"{ours(step):.3g} at step {step}" for step in marks]
    return f"schedule: {train.schedule} after {train.warmup_steps} steps of warm-up, {', '.join(shown)}"


def _marks(total: int | None, warmup: int) -> list[int]:
    """First step, end of the warm-up, middle of the rest, last step."""
    steps = {1, max(1, warmup)}
    if total is not None:
        steps = {step for step in steps if step <= total} | {(min(warmup, total) + total) // 2 or 1, total}
    return sorted(steps)


def torch_rates(kind: str, params: Mapping[str, Any], *, peak: float, steps: Sequence[int]) -> dict[int, float]:
    """The rates of a schedule of torch, from torch's own class beside an optimizer of nothing.

    Args:
        kind: scheduler.type, of those that DeepSpeed takes from torch.
        params: scheduler.params.
        peak: optimizer.params.lr.
        steps: optimizer steps, 1-based, rising; those above `MOST_STEPPED` are left out.

    Raises:
        ConfigError: torch refuses the parameters.
    """
    import torch

    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    rates: dict[int, float] = {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that nothing was optimized
            schedule = getattr(torch.optim.lr_scheduler, kind)(optimizer, **params)
            for step in range(1, min(steps[-1], MOST_STEPPED) + 1):
                if step in steps:
                    rates[step] = float(optimizer.param_groups[0]["lr"])
                schedule.step()
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(f"scheduler.type {kind} does not take these scheduler.params: {error}") from error
    return rates


def scheduled_rate(kind: str, params: Mapping[str, Any], *, peak: float, step: int) -> float | None:
    """The rate of a DeepSpeed schedule in an optimizer step; None for schedules of torch: see `torch_rates`.

    DeepSpeed's runtime/lr_schedules.py counts from -1 and steps after the optimizer: step 1 has where it begins, step 2
    the rate of iteration 0.

    Args:
        kind: scheduler.type.
        params: scheduler.params, filled.
        peak: optimizer.params.lr, which WarmupCosineLR scales.
        step: optimizer step, 1-based.
    """
    iteration = step - 2
    if kind == "LRRangeTest":
        low = params.get("lr_range_test_min_lr", 1e-3)
        interval = (iteration + 1) / params.get("lr_range_test_step_size", 2000)
        interval = math.floor(interval) if params.get("lr_range_test_staircase") else interval
        return float(low * (1 + interval * params.get("lr_range_test_step_rate", 1.0)))
    if kind == "OneCycle":
        return _one_cycle(params, iteration)
    if kind not in ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR"):
        return None
    risen = _risen(params, iteration)
    warmup = max(2, params["warmup_num_steps"])
    if kind == "WarmupCosineLR":
        low, floor = params.get("warmup_min_ratio", 0.0), params.get("cos_min_ratio", 1e-4)
        if iteration < warmup:
            return 0.0 if iteration < 0 else float(peak * (low + (1 - low) * risen))
        done = min(1.0, (iteration - warmup + 1) / max(1, params["total_num_steps"] - warmup))
        return float(peak * max(0.0, floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))))
    if kind == "WarmupDecayLR" and iteration >= warmup:
        total = params["total_num_steps"]
        risen = max(0.0, (total - iteration) / max(1.0, total - warmup))
    low, high = params.get("warmup_min_lr", 0.0), params["warmup_max_lr"]
    return float(low + (high - low) * risen)


def _risen(params: Mapping[str, Any], iteration: int) -> float:
    """How much of the warm-up is done, 0 to 1."""
    warmup = max(2, params["warmup_num_steps"])
    if iteration < 0:
        return 0.0
    if iteration >= warmup:
        return 1.0
    return (
        iteration / warmup
        if params.get("warmup_type", "log") == "linear"
        else math.log(iteration + 1) / math.log(warmup)
    )


def _one_cycle(params: Mapping[str, Any], iteration: int) -> float:
    """Up, down, and then a decay, each in stairs where the JSON asks for them."""
    low, high = params["cycle_min_lr"], params["cycle_max_lr"]
    if iteration < 0:
        return float(low)
    first = float(params.get("cycle_first_step_size", 2000))
    second = float(params.get("cycle_second_step_size") or first)
    stairs = params.get("cycle_first_stair_count", 0)
    if iteration >= first + second:
        size, rate = params.get("decay_step_size", 0), params.get("decay_lr_rate", 0.0)
        if not size or not rate:
            return float(low)
        return float(low / (1 + rate * (iteration - (first + second) + 1) / size))
    place = (iteration + 1) % (first + second)
    risen = place / first if place <= first else (first + second - place) / second
    if place > first:
        stairs = params.get("cycle_second_stair_count") or stairs
    if stairs:
        risen = math.floor(risen * stairs) / stairs
    return float(low + (high - low) * risen)
