"""Values that a key of a DeepSpeed config may have, where its kind alone does not say it.

Outside of them DeepSpeed or torch stop while the engine is built, or divide by zero, or a learning rate is negative.
Sources: DeepSpeed 0.19.8's runtime/lr_schedules.py, torch.optim and torch.optim.lr_scheduler; a test holds what passes
against both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from clap_zero.config.ds_optimizer_params import OPTIMIZER_PARAMS
from clap_zero.config.ds_paths import lookup
from clap_zero.config.schema import MOST_RATE
from clap_zero.config.values import shown

_DTYPES = {
    "fp32": ("fp32", "float32", "float", "torch.float32"),
    "bf16": ("bf16", "bfloat16", "torch.bfloat16"),
    "fp16": ("fp16", "float16", "half", "torch.float16"),
}
DTYPE_OF = {name: dtype for dtype, names in _DTYPES.items() for name in names}
"""How DeepSpeed lets a number format be written -> its short name."""

CHOICES: dict[str, tuple[str, ...]] = {
    "communication_data_type": ("fp32", "bf16", "fp16"),
    "seq_parallel_communication_data_type": ("fp32", "bf16", "fp16"),
    "data_types.grad_accum_dtype": tuple(DTYPE_OF),
    "data_types.param_dtype": tuple(DTYPE_OF),
    "data_types.buffer_dtype": tuple(DTYPE_OF),
    "torch_autocast.dtype": tuple(DTYPE_OF),
    "scheduler.params.warmup_type": ("linear", "log"),
    "scheduler.params.mode": ("triangular", "triangular2", "exp_range"),
    "scheduler.params.scale_mode": ("cycle", "iterations"),
    "scheduler.params.anneal_strategy": ("cos", "linear"),
    "checkpoint.tag_validation": ("Warn", "Ignore", "Fail"),
}
"""Texts of which only some mean something; case counts where DeepSpeed's does."""
_ANY_CASE = ("communication_data_type", "checkpoint.tag_validation")

LEAST: dict[str, float] = {
    "steps_per_print": 1,
    "fp16.loss_scale": 0,
    "fp16.loss_scale_window": 1,
    "fp16.min_loss_scale": 1,
    "fp16.hysteresis": 1,
    "gradient_predivide_factor": 1e-6,
    "zero_optimization.reduce_bucket_size": 1,
    "zero_optimization.allgather_bucket_size": 0,
    "zero_optimization.sub_group_size": 0,
    "zero_optimization.stage3_prefetch_bucket_size": 0,
    "zero_optimization.stage3_param_persistence_threshold": 0,
    "zero_optimization.stage3_max_live_parameters": 0,
    "zero_optimization.stage3_max_reuse_distance": 0,
    "zero_optimization.zero_hpz_partition_size": 0,
    **dict.fromkeys(
        (
            *("zero_optimization.max_live_parameters", "zero_optimization.max_reuse_distance"),
            *("zero_optimization.prefetch_bucket_size", "zero_optimization.param_persistence_threshold"),
            "zero_optimization.model_persistence_threshold",
            "zero_optimization.stage3_model_persistence_threshold",
        ),
        0,
    ),
    "flops_profiler.profile_step": 1,
}
"""Smallest value of a number, where DeepSpeed would stop at less or divide by it."""

_BELOW_1 = 1 - 1e-9
_RATES = ("warmup_min_lr", "cycle_min_lr", "base_lr", "eta_min", "lr_range_test_step_rate", "decay_lr_rate")
_PEAKS = ("warmup_max_lr", "cycle_max_lr", "max_lr", "lr_range_test_min_lr")
_COUNTS = ("cycle_second_step_size", "decay_step_size", "cycle_first_stair_count", "cycle_second_stair_count")
_TINY = 1e-30

RANGES: dict[str, tuple[float, float]] = {
    **{f"scheduler.params.{name}": (0, MOST_RATE) for name in _RATES},
    **{f"scheduler.params.{name}": (_TINY, MOST_RATE) for name in _PEAKS},
    **{f"scheduler.params.{name}": (0, _BELOW_1) for name in ("cycle_min_mom", "cycle_max_mom")},
    **{f"scheduler.params.{name}": (_TINY, _BELOW_1) for name in ("base_momentum", "max_momentum")},
    **{f"scheduler.params.{name}": (0, 2**53) for name in _COUNTS},
    "scheduler.params.cycle_first_step_size": (1, 2**53),
    "scheduler.params.lr_range_test_step_size": (1, 2**53),
    "scheduler.params.last_batch_iteration": (-1, -1),
    **{
        f"optimizer.params.{name}": (0, MOST_RATE)
        for name in ("lr_decay", "initial_accumulator_value", "momentum_decay")
    },
    **{f"optimizer.params.{name}": (0, MOST_RATE) for name in ("t0", "lambd", "max_coeff", "min_coeff")},
    **{f"optimizer.params.{name}": (_TINY, MOST_RATE) for name in ("muon_lr", "adam_lr")},
    **{f"optimizer.params.{name}": (0, 1) for name in ("alpha", "rho", "dampening")},
    "optimizer.params.momentum": (0, _BELOW_1),
    "fp16.initial_scale_power": (0, 64),
    "optimizer.params.beta2_decay": (-MOST_RATE, 0),
    "optimizer.params.d": (1, MOST_RATE),
    "scheduler.params.decay_mom_rate": (0, MOST_RATE),
    "scheduler.params.warmup_min_ratio": (0, 1),
    "scheduler.params.cos_min_ratio": (0, 1),
    "scheduler.params.gamma": (0, 10),
    "scheduler.params.factor": (_TINY, 1),
    "scheduler.params.start_factor": (_TINY, 1),
    "scheduler.params.end_factor": (0, 1),
    "scheduler.params.power": (0, 100),
    "scheduler.params.pct_start": (0, 1),
    "scheduler.params.div_factor": (1e-3, 1e30),
    "scheduler.params.final_div_factor": (1e-3, 1e30),
}
"""Smallest and largest value of a number."""


def wrong_values(ds: Mapping[str, Any]) -> Iterator[str]:
    """A line for each value that is none of those above."""
    for path, choices in CHOICES.items():
        value = lookup(ds, path)
        known = [choice.lower() for choice in choices] if path in _ANY_CASE else choices
        if value not in (None, "auto") and (str(value).lower() if path in _ANY_CASE else value) not in known:
            yield f"{path} is {shown(value)}: {', '.join(choices)} are possible"
    for path, least in LEAST.items():
        value = lookup(ds, path)
        if isinstance(value, (int, float)) and value < least:
            yield f"{path} is {shown(value)}: {least:g} or more is needed"
    for path, (low, high) in RANGES.items():
        value = lookup(ds, path)
        if isinstance(value, (int, float)) and not low <= value <= high:
            yield f"{path} is {shown(value)}: {_worded(low, high)} is needed"
    yield from _scale(ds)
    yield from _milestones(lookup(ds, "scheduler.params.milestones"))
    yield from _momentum_to_cycle(ds)


def _worded(low: float, high: float) -> str:
    if low == high:
        return f"{low:g}"
    above = "a number above 0" if low == _TINY else f"{low:g}"
    if high == _BELOW_1:
        return f"{above} to below 1"
    return f"{above}, at most {high:g}," if low == _TINY else f"{above} to {high:g}"


def _scale(ds: Mapping[str, Any]) -> Iterator[str]:
    """A dynamic loss scale that begins below its minimum would jump up at the first overflow."""
    power, least = lookup(ds, "fp16.initial_scale_power"), lookup(ds, "fp16.min_loss_scale")
    begins = 2.0 ** (power if isinstance(power, int) and 0 <= power <= 64 else 16)
    if isinstance(least, (int, float)) and least > begins and not _is_static(lookup(ds, "fp16.loss_scale")):
        yield (
            f"fp16.min_loss_scale is {shown(least)}, and the scale begins below it, at {begins:g} "
            "(fp16.initial_scale_power): lower it"
        )


def _is_static(scale: Any) -> bool:
    return isinstance(scale, (int, float)) and scale > 0


def _milestones(value: Any) -> Iterator[str]:
    if isinstance(value, list) and not all(isinstance(step, int) and 0 <= step <= 2**53 for step in value):
        yield f"scheduler.params.milestones is {shown(value)}: whole numbers of 0 or more are needed"


def _momentum_to_cycle(ds: Mapping[str, Any]) -> Iterator[str]:
    """Two of torch's schedules move the momentum unless they are told not to, and stop where there is none."""
    kind = lookup(ds, "scheduler.type")
    if kind not in ("CyclicLR", "OneCycleLR") or lookup(ds, "scheduler.params.cycle_momentum") is False:
        return
    optimizer = lookup(ds, "optimizer.type") or "AdamW"
    if {"betas", "momentum"}.isdisjoint(OPTIMIZER_PARAMS.get(str(optimizer).lower(), {"momentum": ""})):
        yield (
            f"scheduler.type {kind} moves the momentum, and optimizer.type {optimizer} has none: set "
            "scheduler.params.cycle_momentum to false"
        )
