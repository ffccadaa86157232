"""Optimizer and scheduler of a DeepSpeed config, and the rule for numbers that the run config holds, too."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from clap_zero.config.ds_keys import MUP_OPTIMIZERS, OPTIMIZERS, REMOVED_OPTIMIZERS, SCHEDULER_PARAMS
from clap_zero.config.ds_optimizer_params import fit_adam, refuse_unusable
from clap_zero.config.ds_paths import lookup
from clap_zero.config.ds_torch_schedules import TORCH_SCHEDULES, check_torch_schedule
from clap_zero.config.schema import MOST_RATE, RunConfig
from clap_zero.config.values import nearest, shown
from clap_zero.errors import ConfigError

ADAM_DEFAULTS = {"betas": [0.9, 0.999], "eps": 1e-8}
"""LAION's recipe, and DeepSpeed's and torch's defaults."""


def settle_optimizer(
    ds: dict[str, Any], run: RunConfig, *, explicit: Collection[str], device_type: str, stage: int
) -> None:
    """An optimizer with all numbers: from the JSON where it has them, else from the run config."""
    section = ds.setdefault("optimizer", {})
    kind = section.setdefault("type", "AdamW")
    _check_optimizer_type(ds, kind, stage=stage)
    params = section.setdefault("params", {})
    _take_peak(ds, params, run, explicit=explicit)
    for name, value in (("lr", run.train.learning_rate), ("weight_decay", run.train.weight_decay)):
        key = "train.learning_rate" if name == "lr" else "train.weight_decay"
        own(params, name, path=f"optimizer.params.{name}", value=value, key=key, explicit=explicit)
    if kind.lower() in ("adam", "adamw"):
        for name, default in ADAM_DEFAULTS.items():
            if name == "betas" and cycles_momentum(ds):
                if params.get(name) == "auto":
                    del params[name]
            elif params.get(name, "auto") == "auto":
                params[name] = default
        for name in ("torch_adam", "adam_w_mode"):
            if params.get(name) == "auto":
                del params[name]
    if device_type == "cpu" and kind.lower() in ("adam", "adamw", "muon"):
        # DeepSpeed's own Adam is compiled at first use, which takes minutes and can hang (see the README).
        params.setdefault("torch_adam", True)
    if kind.lower() in ("adam", "adamw"):
        fit_adam(ds, params)
    if device_type == "cpu":
        ds.setdefault("zero_force_ds_cpu_optimizer", False)
    refuse_unusable(ds, kind.lower(), params, stage=stage, on_cpu=device_type == "cpu")
    _check_optimizer_numbers(params)


CLASSES = {
    "fusedadam": "AdamW",
    "cpuadam": "AdamW",
    "deepspeedcpuadam": "AdamW",
    "fusedlamb": "lamb",
    "fusedlion": "lion",
}
"""DeepSpeed's classes -> the type for which it takes them, each where it fits."""

PEAK_OF = {"WarmupLR": "warmup_max_lr", "WarmupDecayLR": "warmup_max_lr", "OneCycle": "cycle_max_lr"}
"""Schedules that set the learning rate whatever the optimizer's is -> the parameter that holds their highest."""


def _take_peak(ds: Mapping[str, Any], params: dict[str, Any], run: RunConfig, *, explicit: Collection[str]) -> None:
    """The optimizer's rate is that of the schedule where the schedule decides it."""
    name = PEAK_OF.get(str(lookup(ds, "scheduler.type")))
    peak = lookup(ds, f"scheduler.params.{name}")
    if name is None or not _is_number(peak):
        return
    path, given = f"scheduler.params.{name}", params.get("lr", "auto")
    if given not in ("auto", peak):
        raise ConfigError(
            f"optimizer.params.lr {shown(given)} and {path} {shown(peak)} contradict each other, and the schedule's "
            'would be used: set one of them to "auto", or both to the same'
        )
    own({name: peak}, name, path=path, value=run.train.learning_rate, key="train.learning_rate", explicit=explicit)
    params["lr"] = peak


def _check_optimizer_type(ds: Mapping[str, Any], kind: str, *, stage: int) -> None:
    if kind.lower() in REMOVED_OPTIMIZERS:
        raise ConfigError(f"optimizer.type {kind}: DeepSpeed removed the 1-bit optimizers in 0.19.7: use AdamW")
    if kind.lower() in MUP_OPTIMIZERS:
        raise ConfigError(f"optimizer.type {kind} needs base shapes of the mup package, and CLAP has none: use AdamW")
    known = {name.lower(): name for name in OPTIMIZERS}
    name = known.get(kind.lower())
    if name is None or (name != name.lower() and kind != name):
        match = CLASSES.get(kind.lower()) or known.get(nearest(kind.lower(), known) or "", "AdamW")
        raise ConfigError(f"optimizer.type {kind} is not known: did you mean {match}?")
    if stage > 0 and not OPTIMIZERS[name] and ds.get("zero_allow_untested_optimizer") is not True:
        raise ConfigError(
            f"optimizer.type {kind} has not been tested with ZeRO: add "
            '"zero_allow_untested_optimizer": true to use it all the same, or use AdamW'
        )


def _check_optimizer_numbers(params: Mapping[str, Any]) -> None:
    lr, decay, betas = params["lr"], params["weight_decay"], params.get("betas")
    for path, value, fits, needed in (
        ("lr", lr, _is_number(lr) and 0 < lr <= MOST_RATE, f"a number above 0 and at most {MOST_RATE:g}"),
        ("weight_decay", decay, _is_number(decay) and 0 <= decay <= MOST_RATE, f"0 to {MOST_RATE:g}"),
    ):
        if not fits:
            raise ConfigError(f"optimizer.params.{path} is {shown(value)}: {needed} is needed")
    eps = params.get("eps")
    if eps is not None and _is_number(eps) and eps <= 0:
        raise ConfigError(
            f"optimizer.params.eps is {shown(eps)}: a number above 0 is needed, a weight without gradient would be "
            "divided by 0"
        )
    if isinstance(betas, list) and not (len(betas) == 2 and all(_is_number(beta) and 0 <= beta < 1 for beta in betas)):
        raise ConfigError(f"optimizer.params.betas is {betas}: two numbers from 0 to below 1 are needed")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def settle_scheduler(
    ds: dict[str, Any],
    run: RunConfig,
    *,
    explicit: Collection[str],
    warmup_steps: int,
    total_steps: int | None,
    notes: list[str],
) -> None:
    """Fills the scheduler of the JSON, if any; DeepSpeed's default of warmup_max_lr would ignore the optimizer's lr."""
    section = ds.get("scheduler")
    if section is None:
        return
    kind = section.get("type")
    if kind is None:
        raise ConfigError("scheduler.type is missing: name one, such as WarmupCosineLR, or remove the section")
    _refuse_overruled(ds, run, kind, explicit=explicit)
    table = SCHEDULER_PARAMS.get(kind)
    params = section.setdefault("params", {})
    if kind in TORCH_SCHEDULES:
        check_torch_schedule(ds, kind, params, total_steps=total_steps)
        return
    if table is None:
        known = {name.lower(): name for name in (*SCHEDULER_PARAMS, *TORCH_SCHEDULES)}
        match = known.get(str(kind).lower()) or nearest(kind, known.values())
        hint = f"did you mean {match}?" if match is not None else f"there are {', '.join(known.values())}"
        raise ConfigError(f"scheduler.type {kind} is not known: {hint}")
    lr = ds["optimizer"]["params"]["lr"]
    if params.get("cycle_max_lr") == "auto":
        params["cycle_max_lr"] = lr
    if "warmup_num_steps" not in table:
        missing = [name for name in ("cycle_min_lr", "cycle_max_lr") if name in table and name not in params]
        if missing:
            raise ConfigError(f"scheduler.params.{missing[0]} is missing: scheduler.type {kind} needs it")
        return
    path, key = "scheduler.params.warmup_num_steps", "train.warmup_steps"
    own(params, "warmup_num_steps", path=path, value=max(1, warmup_steps), key=key, explicit=explicit)
    if total_steps is not None and "total_num_steps" in table and params.get("total_num_steps", "auto") == "auto":
        params["total_num_steps"] = total_steps
    if "warmup_max_lr" in table and params.get("warmup_max_lr", "auto") == "auto":
        params["warmup_max_lr"] = lr
    if params.get("cos_min_ratio", "auto") == "auto" and "cos_min_ratio" in table:
        params["cos_min_ratio"] = run.train.min_learning_rate / lr
    for name, value in (("warmup_min_lr", 0.0), ("warmup_min_ratio", 0.0), ("warmup_type", "linear")):
        if params.get(name) == "auto":
            params[name] = value
    if params["warmup_num_steps"] < 1:
        raise ConfigError(f"{path} is {params['warmup_num_steps']}: DeepSpeed needs 1 or more, write 1 for no warm-up")
    low, high = params.get("warmup_min_lr", 0.0), params.get("warmup_max_lr")
    if high is not None and low > high:
        raise ConfigError(
            f"scheduler.params.warmup_min_lr {shown(low)} is above warmup_max_lr {shown(high)}: lower one or raise the "
            "other"
        )
    _check_length(params, kind=kind, total_steps=total_steps, notes=notes)


def _check_length(params: Mapping[str, Any], *, kind: str, total_steps: int | None, notes: list[str]) -> None:
    """A schedule that decays to its end has to fit the run: DeepSpeed trains on at that end without a word.

    Raises:
        ConfigError: It ends before its warm-up does, so that the rate never rises.
    """
    length, path = params.get("total_num_steps"), "scheduler.params.total_num_steps"
    if not isinstance(length, int):
        return
    warmup_steps = params["warmup_num_steps"]
    if length < warmup_steps:
        raise ConfigError(
            f"{path} is {length}, and the warm-up alone (warmup_num_steps) takes {warmup_steps} steps, so the rate "
            f'of {kind} would stay 0: lower the warm-up, or give the length of the run ("auto" takes it)'
        )
    if total_steps is not None and length != total_steps:
        when = f"is at its end from step {length} on" if length < total_steps else "does not come to its end"
        notes.append(
            f'{path} is {length} and the run has {total_steps} steps: the learning rate {when}; "auto" fits it'
        )


def own(section: dict[str, Any], name: str, *, path: str, value: Any, key: str, explicit: Collection[str]) -> None:
    """The rule for a number that JSON and run config could both hold: the JSON's, unless absent or "auto".

    Raises:
        ConfigError: the user gave both and they differ.
    """
    present = section.get(name, "auto")
    if present == "auto":
        section[name] = value
    elif key in explicit and present != value:
        raise ConfigError(
            f"{path} is {shown(present)} in the DeepSpeed JSON and {key} is {shown(value)} in the run config: "
            f"make them equal, leave --{key} away, or let the run config decide with --ds.{path} auto"
        )


def cycles_momentum(ds: Mapping[str, Any]) -> bool:
    """Whether the JSON's schedule sets the optimizer's betas in each step."""
    return lookup(ds, "scheduler.type") == "OneCycle" and lookup(ds, "scheduler.params.cycle_momentum") is not False


def has_warmup(ds: Mapping[str, Any]) -> bool:
    """Whether train.warmup_steps acts: in our own schedule and in DeepSpeed's that are named after it."""
    kind = lookup(ds, "scheduler.type")
    return kind is None or "warmup_num_steps" in SCHEDULER_PARAMS.get(str(kind), {})


def _refuse_overruled(ds: Mapping[str, Any], run: RunConfig, kind: str, *, explicit: Collection[str]) -> None:
    """Keys of the run config that a schedule in the JSON leaves without effect."""
    train = run.train
    for key, value, acts in (
        ("train.schedule", train.schedule, train.schedule == "cosine"),
        ("train.min_learning_rate", train.min_learning_rate, kind == "WarmupCosineLR" or not train.min_learning_rate),
        ("train.warmup_steps", train.warmup_steps, has_warmup(ds) or not train.warmup_steps),
    ):
        if key in explicit and not acts:
            raise ConfigError(
                f"{key} {value} does nothing beside scheduler.type {kind} of the DeepSpeed JSON: leave it out, or "
                "remove the JSON's scheduler (--ds.scheduler null)"
            )
