"""`optimizer.params` by type, and which of them the implementation takes that DeepSpeed chooses for a device.

Written down from DeepSpeed 0.19.8's ops/ and engine.get_optimizer_configuration, and from torch.optim; a test holds the
tables against their signatures. DeepSpeed hands the parameters on as they are: one too many ends in a TypeError when
the engine is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clap_zero.config.ds_paths import lookup
from clap_zero.config.ds_side_keys import BOOL, FLOAT, LIST, STR
from clap_zero.config.values import shown
from clap_zero.errors import ConfigError

_ALL = {"lr": FLOAT, "weight_decay": FLOAT}
_TORCH = {**_ALL, **dict.fromkeys(("foreach", "maximize", "differentiable"), BOOL)}
_BETAS = {"betas": LIST, "eps": FLOAT}
_CAPTURABLE = {"capturable": BOOL}

TORCH_ADAM = {**_TORCH, **_BETAS, **_CAPTURABLE, "amsgrad": BOOL, "fused": BOOL}
FUSED_ADAM = {**_ALL, **_BETAS, "bias_correction": BOOL, "amsgrad": BOOL, "set_grad_none": BOOL}
CPU_ADAM = {**_ALL, **_BETAS, "bias_correction": BOOL, "amsgrad": BOOL}
CHOOSING_ADAM = {"torch_adam": BOOL, "adam_w_mode": BOOL, "fp32_optimizer_states": BOOL}
"""Parameters that DeepSpeed takes out before it makes an Adam."""
ADAM_PARAMS = {**TORCH_ADAM, **FUSED_ADAM, **CHOOSING_ADAM}

OPTIMIZER_PARAMS: dict[str, dict[str, str]] = {
    "adam": ADAM_PARAMS,
    "adamw": ADAM_PARAMS,
    "lamb": {
        **_ALL,
        **_BETAS,
        "max_coeff": FLOAT,
        "min_coeff": FLOAT,
        **dict.fromkeys(("bias_correction", "eps_inside_sqrt", "amsgrad"), BOOL),
    },
    "lion": {**_ALL, "betas": LIST, "set_grad_none": BOOL, "fp32_optimizer_states": BOOL},
    "adagrad": {
        **_TORCH,
        "eps": FLOAT,
        "lr_decay": FLOAT,
        "initial_accumulator_value": FLOAT,
        **dict.fromkeys(("fused", "amsgrad", "fp32_optimizer_states"), BOOL),
    },
    "sgd": {**_TORCH, "momentum": FLOAT, "dampening": FLOAT, "nesterov": BOOL, "fused": BOOL},
    "rmsprop": {**_TORCH, **_CAPTURABLE, "alpha": FLOAT, "eps": FLOAT, "momentum": FLOAT, "centered": BOOL},
    "nadam": {**_TORCH, **_CAPTURABLE, **_BETAS, "momentum_decay": FLOAT, "decoupled_weight_decay": BOOL},
    "radam": {**_TORCH, **_CAPTURABLE, **_BETAS, "decoupled_weight_decay": BOOL},
    "adamax": {**_TORCH, **_CAPTURABLE, **_BETAS},
    "adadelta": {**_TORCH, **_CAPTURABLE, "rho": FLOAT, "eps": FLOAT},
    "asgd": {**_TORCH, **_CAPTURABLE, "lambd": FLOAT, "alpha": FLOAT, "t0": FLOAT},
    "muon": {
        **_ALL,
        **_BETAS,
        **dict.fromkeys(("muon_lr", "adam_lr", "momentum"), FLOAT),
        "ns_method": STR,
        **dict.fromkeys(("torch_adam", "adam_w_mode", "fp32_optimizer_states"), BOOL),
    },
    "adafactor": {**_ALL, "beta2_decay": FLOAT, "eps": LIST, "d": FLOAT, "foreach": BOOL, "maximize": BOOL},
}
"""Lower-case type -> its parameters; those of other types are passed on."""

_DONE_ANYWAY = {"bias_correction": True, "set_grad_none": True, "amsgrad": False, "maximize": False}
"""What every Adam does where it has no parameter for it: such a value is left out."""


_ONE_RATE = ("WarmupLR", "WarmupDecayLR", "OneCycle", "LRRangeTest", "OneCycleLR", "CyclicLR")
"""Schedules that set a rate, and do not scale the one that a group of parameters has."""
CPU_ADAGRAD = {**_ALL, "eps": FLOAT, **dict.fromkeys(("amsgrad", "fp32_optimizer_states"), BOOL)}


def refuse_unusable(ds: Mapping[str, Any], kind: str, params: Mapping[str, Any], *, stage: int, on_cpu: bool) -> None:
    """Parameters that torch or DeepSpeed would stop at, when the optimizer is made or at its first step.

    Args:
        ds: the whole config.
        kind: optimizer.type in lower case.
        params: optimizer.params.
        stage: of ZeRO.
        on_cpu: whether the ranks compute on the CPU.

    Raises:
        ConfigError: one of them, or an optimizer that cannot be used at this stage.
    """
    path = "optimizer.params"
    offloads = lookup(ds, "zero_optimization.offload_optimizer.device") in ("cpu", "nvme")
    if kind == "adagrad" and stage and not offloads:
        raise ConfigError(
            f"optimizer.type Adagrad at zero_optimization.stage {stage}: DeepSpeed makes torch's Adagrad anew there "
            "without its groups of parameters, and stops, or decays what it should not: use stage 0, "
            "zero_optimization.offload_optimizer with device cpu, or AdamW"
        )
    if kind == "muon" and stage == 3 and lookup(ds, "zero_optimization.reduce_scatter") is not False:
        raise ConfigError(
            "optimizer.type Muon at zero_optimization.stage 3 needs whole gradients: set "
            "zero_optimization.reduce_scatter to false, or use stage 2"
        )
    schedule = lookup(ds, "scheduler.type")
    own = next((name for name in ("muon_lr", "adam_lr") if name in params), None)
    if own is not None and schedule in _ONE_RATE:
        raise ConfigError(
            f"{path}.{own} does nothing beside scheduler.type {schedule}, which gives all parameters one rate: use "
            "WarmupCosineLR, or remove the schedule (--ds.scheduler null)"
        )
    if kind == "adagrad":
        known = CPU_ADAGRAD if offloads else {**OPTIMIZER_PARAMS[kind], "amsgrad": None}
        extra = next((name for name in params if not known.get(name)), None)
        if extra is not None:
            raise ConfigError(f"{path}.{extra} {shown(params[extra])} does nothing in this Adagrad: remove it")
    if params.get("differentiable") is True:
        raise ConfigError(f"{path}.differentiable true is for differentiating through the optimizer: remove it")
    if params.get("capturable") is True and on_cpu:
        raise ConfigError(f"{path}.capturable true is for CUDA graphs, and these ranks compute on the CPU: remove it")
    if params.get("fused") is True and params.get("foreach") is True:
        raise ConfigError(f"{path}.fused true and {path}.foreach true exclude each other: remove one of them")
    if params.get("nesterov") is True and (not params.get("momentum") or params.get("dampening")):
        raise ConfigError(f"{path}.nesterov true needs {path}.momentum above 0 and no {path}.dampening")
    eps = params.get("eps")
    if kind == "adafactor" and isinstance(eps, list) and not _are_two_numbers(eps):
        raise ConfigError(f"{path}.eps is {shown(eps)}: null or a number, and a number, both 0 or more, are needed")


def _are_two_numbers(values: list[Any]) -> bool:
    numbers = [0 if value is None and at == 0 else value for at, value in enumerate(values)]
    return len(numbers) == 2 and all(isinstance(n, (int, float)) and n >= 0 for n in numbers)


def fit_adam(ds: Mapping[str, Any], params: dict[str, Any]) -> None:
    """Leaves out of Adam's parameters what the chosen implementation does anyway.

    Args:
        ds: the whole config, with `torch_adam` settled.
        params: optimizer.params of an Adam or AdamW, changed in place.

    Raises:
        ConfigError: a parameter that this implementation has not.
    """
    if params.get("torch_adam"):
        name, known, way_out = "torch's Adam", TORCH_ADAM, "set optimizer.params.torch_adam to false"
    elif lookup(ds, "zero_optimization.offload_optimizer.device") in ("cpu", "nvme"):
        name, known, way_out = "DeepSpeed's CPU Adam", CPU_ADAM, "set optimizer.params.torch_adam to true"
    else:
        name, known, way_out = "DeepSpeed's fused Adam", FUSED_ADAM, "set optimizer.params.torch_adam to true"
    for key in [key for key in params if key not in known and key not in CHOOSING_ADAM]:
        if params[key] != _DONE_ANYWAY.get(key, False):
            raise ConfigError(
                f"optimizer.params.{key} {shown(params[key])} does nothing in {name}, which this run uses: remove it "
                f"(--ds.optimizer.params.{key} null), or {way_out}"
            )
        del params[key]
    if params.get("amsgrad") is True and not params.get("torch_adam"):
        raise ConfigError(f"optimizer.params.amsgrad true: {name} has no AMSGrad: {way_out}, or remove it")
