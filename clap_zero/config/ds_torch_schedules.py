"""Schedules of torch that DeepSpeed 0.19.8 also takes by name: where they work, and what they need.

Their parameters are written down from torch.optim.lr_scheduler; a test holds the tables against its signatures.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clap_zero.config.ds_paths import lookup
from clap_zero.config.ds_side_keys import BOOL, FLOAT, INT, LIST, STR
from clap_zero.config.values import shown
from clap_zero.errors import ConfigError

_MOMENTUM = {"cycle_momentum": BOOL, "base_momentum": FLOAT, "max_momentum": FLOAT}

TORCH_SCHEDULES: dict[str, dict[str, str]] = {
    "StepLR": {"step_size": INT, "gamma": FLOAT},
    "MultiStepLR": {"milestones": LIST, "gamma": FLOAT},
    "ConstantLR": {"factor": FLOAT, "total_iters": INT},
    "LinearLR": {"start_factor": FLOAT, "end_factor": FLOAT, "total_iters": INT},
    "ExponentialLR": {"gamma": FLOAT},
    "PolynomialLR": {"total_iters": INT, "power": FLOAT},
    "CosineAnnealingLR": {"T_max": INT, "eta_min": FLOAT},
    "CosineAnnealingWarmRestarts": {"T_0": INT, "T_mult": INT, "eta_min": FLOAT},
    "CyclicLR": {
        **dict.fromkeys(("base_lr", "max_lr"), FLOAT),
        **dict.fromkeys(("step_size_up", "step_size_down"), INT),
        **dict.fromkeys(("mode", "scale_mode"), STR),
        "gamma": FLOAT,
        **_MOMENTUM,
    },
    "OneCycleLR": {
        "max_lr": FLOAT,
        **dict.fromkeys(("total_steps", "epochs", "steps_per_epoch"), INT),
        **dict.fromkeys(("pct_start", "div_factor", "final_div_factor"), FLOAT),
        "anneal_strategy": STR,
        "three_phase": BOOL,
        **_MOMENTUM,
    },
}
"""Type -> its parameters. `last_epoch` and functions are left out: a new run has no use for the one, JSON no words for
the others. Rates of their own for each group of parameters are left out, too: which groups there are is not for a JSON
to know."""

REQUIRED: dict[str, tuple[str, ...]] = {
    "StepLR": ("step_size",),
    "MultiStepLR": ("milestones",),
    "ExponentialLR": ("gamma",),
    "CosineAnnealingLR": ("T_max",),
    "CosineAnnealingWarmRestarts": ("T_0",),
    "CyclicLR": ("base_lr", "max_lr"),
    "OneCycleLR": ("max_lr",),
}
"""Type -> parameters without a default."""


def check_torch_schedule(ds: Mapping[str, Any], kind: str, params: dict[str, Any], *, total_steps: int | None) -> None:
    """Refuses a schedule with which the engine could not be built, or that would end the run.

    DeepSpeed gives a schedule the optimizer that the engine steps. With ZeRO or low precision that is a wrapper of its
    own, which torch's schedules do not take for an optimizer (runtime/engine.py, _scheduler_from_config).

    Args:
        ds: the whole config, stage and precision settled.
        kind: one of TORCH_SCHEDULES.
        params: scheduler.params; numbers become floats where torch wants them.
        total_steps: optimizer steps of the run, None if not known.

    Raises:
        ConfigError: ZeRO or low precision, a parameter that is missing or below 1, or a length below that of the run.
    """
    stage = lookup(ds, "zero_optimization.stage")
    low = next((name for name in ("bf16", "fp16") if lookup(ds, f"{name}.enabled")), None)
    if stage or low:
        beside = f"zero_optimization.stage {stage}" if stage else f"{low}.enabled true"
        raise ConfigError(
            f"scheduler.type {kind} is torch's, and DeepSpeed can use it at stage 0 in fp32 only, not with {beside}: "
            "use WarmupCosineLR, or remove the section, and train.schedule decides"
        )
    for name in REQUIRED.get(kind, ()):
        if name not in params:
            raise ConfigError(f"scheduler.params.{name} is missing: scheduler.type {kind} needs it")
    for name, value in params.items():
        if TORCH_SCHEDULES[kind][name] == INT and value != "auto" and value < 1:
            raise ConfigError(f"scheduler.params.{name} is {shown(value)}: 1 or more is needed")
        if TORCH_SCHEDULES[kind][name] == FLOAT and value != "auto":
            params[name] = float(value)  # torch refuses a pct_start of 1
    if kind == "OneCycleLR":
        _check_one_cycle(params, total_steps)


def _check_one_cycle(params: Mapping[str, Any], total_steps: int | None) -> None:
    """The one schedule that has an end, and raises there."""
    epochs, per_epoch = params.get("epochs"), params.get("steps_per_epoch")
    length = params.get("total_steps", epochs * per_epoch if epochs and per_epoch else None)
    if length is None:
        raise ConfigError("scheduler.params.total_steps is missing: scheduler.type OneCycleLR needs it")
    if total_steps is not None and length != "auto" and length < total_steps:
        raise ConfigError(
            f"scheduler.type OneCycleLR ends after {length} steps and stops there, and the run has {total_steps}: "
            f"set scheduler.params.total_steps to {total_steps}"
        )
