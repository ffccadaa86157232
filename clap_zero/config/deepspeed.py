"""DeepSpeed JSON + run config + machine -> the checked dictionary that `deepspeed.initialize` gets.

Pure: no files but the JSON, no torch, no DeepSpeed. The rule of ownership: the JSON owns its keys; where one is absent
or "auto", the run config fills it; a number that the user gave in both and that differs is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from clap_zero.config.batch import Batch, fill_batch, held_bytes, kept_micro, largest_micro_batch, refuse_unequal_share
from clap_zero.config.ds_contradictions import refuse_contradictions
from clap_zero.config.ds_effects import settle_effects
from clap_zero.config.ds_json import check_keys, load_ds_json
from clap_zero.config.ds_optimizer import has_warmup, own, settle_optimizer, settle_scheduler
from clap_zero.config.ds_paths import lookup
from clap_zero.config.ds_sections import (
    auto_paths,
    fill_fixed_autos,
    pass_on_defaults,
    refuse_autos,
    refuse_unfillable,
    refuse_unsupported,
    settle_activation_checkpointing,
    settle_precision,
    settle_zero,
)
from clap_zero.config.objective import refuse_single_pair
from clap_zero.config.preset import load_preset
from clap_zero.config.schema import RunConfig
from clap_zero.errors import ConfigError

__all__ = ["Machine", "ResolvedDeepSpeed", "load_ds_json", "resolve"]

WARMUP_SHARE = 10
"""A recommended (not a demanded) warm-up takes at most one step in so many."""

BATCH_KEYS = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")


@dataclass(frozen=True)
class Machine:
    """What of the machine and the data decides an "auto".

    Attributes:
        memory_bytes: the smallest memory over ranks, of what one rank may use; 0 if not known.
        num_samples: training pairs; 0 if not known.
        device_type: "cpu", "cuda" or another of torch's.
        precisions: those that DeepSpeed takes on this device; most CPUs have no fp16, older GPUs no bf16.
    """

    memory_bytes: int
    num_samples: int
    device_type: str
    precisions: Collection[str] = ("fp32", "bf16", "fp16")


@dataclass(frozen=True)
class ResolvedDeepSpeed:
    """A DeepSpeed config without anything left to guess.

    Attributes:
        config: for `deepspeed.initialize`; no "auto" of ours is left, moved defaults are written out.
        micro_batch: pairs per forward and rank.
        accumulation: forwards per optimizer step.
        global_batch: pairs per optimizer step over all ranks.
        stage: ZeRO stage.
        precision: of the weights in forward and backward.
        activation_checkpointing: whether the section is there.
        explanation: lines for the user, the arithmetic first.
        run: the run config with the numbers that are in force (those that the JSON owns, the warm-up); this is what
            to record and to build the schedule from.
        total_steps: length of the run in optimizer steps; None if it needs the number of samples and that is unknown.
    """

    config: dict[str, Any]
    micro_batch: int
    accumulation: int
    global_batch: int
    stage: int
    precision: Literal["fp32", "bf16", "fp16"]
    activation_checkpointing: bool
    run: RunConfig
    total_steps: int | None
    explanation: list[str] = field(default_factory=list)

    @property
    def held_bytes(self) -> int:
        """Memory of the log-mels that a rank keeps between two passes; see `batch.held_bytes`."""
        return held_bytes(self.run, micro_batch=self.micro_batch, accumulation=self.accumulation)


def resolve(
    ds: Mapping[str, Any],
    run: RunConfig,
    *,
    world_size: int,
    machine: Machine,
    recorded: Mapping[str, Any] | None = None,
    explicit: Collection[str] = (),
) -> ResolvedDeepSpeed:
    """Fills, checks and explains a DeepSpeed config.

    Args:
        ds: what `load_ds_json` returned.
        run: the run config.
        world_size: ranks.
        recorded: resolved config of the run that is continued: wins over a new computation for "auto" keys that
            depend on the machine.
        explicit: dotted keys of the run config that the user gave; only those can contradict the JSON.

    Raises:
        ConfigError: contradictions, "auto" that nobody can fill (all paths), settings without a meaning.
    """
    assert world_size >= 1, "a world has at least one rank"
    config = check_keys(ds)
    before = recorded or {}
    notes = _refuse_together(config, run, world_size=world_size)
    stage = settle_zero(config, device_type=machine.device_type)
    precision = settle_precision(
        config, recorded=before, device_type=machine.device_type, precisions=machine.precisions
    )
    fill_fixed_autos(config)
    checkpointing = settle_activation_checkpointing(config, device_type=machine.device_type, notes=notes)
    settle_optimizer(config, run, explicit=explicit, device_type=machine.device_type, stage=stage)
    why = _settle_batch(config, run, before=before, world_size=world_size, machine=machine, checkpointing=checkpointing)
    refuse_single_pair(
        run.objective.negatives, micro=config[BATCH_KEYS[0]], whole=config[BATCH_KEYS[2]], world_size=world_size
    )
    total_steps = _total_steps(run, num_samples=machine.num_samples, global_batch=config[BATCH_KEYS[2]])
    warmup_steps = _warmup_steps(
        run, total_steps=total_steps, explicit=explicit, notes=notes if _warmup_is_ours(config) else []
    )
    settle_scheduler(config, run, explicit=explicit, warmup_steps=warmup_steps, total_steps=total_steps, notes=notes)
    pass_on_defaults(config)
    refuse_autos(list(auto_paths(config)))
    return ResolvedDeepSpeed(
        config=config,
        micro_batch=config[BATCH_KEYS[0]],
        accumulation=config[BATCH_KEYS[1]],
        global_batch=config[BATCH_KEYS[2]],
        stage=stage,
        precision=precision,
        activation_checkpointing=checkpointing,
        run=_in_force(config, run, warmup_steps=warmup_steps),
        total_steps=total_steps,
        explanation=[*why, _summary(config, stage=stage, precision=precision, checkpointing=checkpointing), *notes],
    )


def _refuse_together(config: dict[str, Any], run: RunConfig, *, world_size: int) -> list[str]:
    """All that can be told from what was written, in one error; returns lines for the user."""
    notes: list[str] = []
    faults: list[str] = []
    for check in (
        lambda: notes.extend(settle_effects(config)),
        lambda: refuse_unsupported(config),
        lambda: refuse_unfillable(config),
        lambda: refuse_contradictions(config, run, world_size=world_size),
    ):
        try:
            check()
        except ConfigError as error:
            faults.append(str(error))
    if faults:
        raise ConfigError("\n".join(faults))
    return notes


def _settle_batch(
    config: dict[str, Any],
    run: RunConfig,
    *,
    before: Mapping[str, Any],
    world_size: int,
    machine: Machine,
    checkpointing: bool,
) -> list[str]:
    """Writes the three batch numbers into the config; returns the lines that explain them."""
    preset = load_preset(run.model.preset)
    low_precision = any(lookup(config, f"{name}.enabled") for name in ("bf16", "fp16"))

    def largest(held: int) -> int | None:
        return largest_micro_batch(
            preset,
            memory_bytes=machine.memory_bytes,
            checkpointing=checkpointing,
            low_precision=low_precision,
            held=held,
        )

    given = _given_batch(config, run, before=before, world_size=world_size, largest_micro=largest(0))

    def filled(held: int) -> tuple[Batch, list[str]]:
        return fill_batch(
            given,
            world_size=world_size,
            target=preset.global_batch_size,
            largest_micro=largest(held),
            num_samples=machine.num_samples,
        )

    batch, why = filled(0)
    assert batch.micro is not None and batch.accumulation is not None
    held = held_bytes(run, micro_batch=batch.micro, accumulation=batch.accumulation)
    if held:  # only now known: a step in one pass holds nothing
        batch, why = filled(held)
    config.update(zip(BATCH_KEYS, (batch.micro, batch.accumulation, batch.whole), strict=True))
    return why


def _given_batch(
    config: dict[str, Any], run: RunConfig, *, before: Mapping[str, Any], world_size: int, largest_micro: int | None
) -> Batch:
    """The batch numbers that are decided: JSON, then run config, then what the continued run recorded."""
    for name, key, value in (
        (BATCH_KEYS[0], "train.micro_batch_size", run.train.micro_batch_size),
        (BATCH_KEYS[2], "train.global_batch_size", run.train.global_batch_size),
    ):
        if value != "auto":
            own(config, name, path=name, value=value, key=key, explicit=(key,))
    micro, accumulation, whole = (_number(config.get(name)) for name in BATCH_KEYS)
    recorded = Batch(*(_number(before.get(name)) for name in BATCH_KEYS))
    if whole is None and (micro is None or accumulation is None) and recorded.whole is not None:
        whole = recorded.whole
        refuse_unequal_share(Batch(micro, accumulation, whole), world_size=world_size)
    elif whole is None and micro is not None and BATCH_KEYS[1] not in config:
        accumulation = 1  # as DeepSpeed does when only the micro batch is given
    if micro is None and accumulation is None and whole is not None and whole == recorded.whole:
        over_ranks = run.model.batch_norm == "sync" and run.objective.negatives != "local"
        micro = kept_micro(recorded, world_size=world_size, over_ranks=over_ranks, largest_micro=largest_micro)
    return Batch(micro, accumulation, whole)


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def _total_steps(run: RunConfig, *, num_samples: int, global_batch: int) -> int | None:
    if run.train.max_steps is not None:
        return run.train.max_steps
    if num_samples <= 0:
        return None
    assert run.train.epochs is not None, "the schema demands one of max_steps and epochs"
    return max(1, round(run.train.epochs * (num_samples // global_batch)))


def _warmup_is_ours(config: Mapping[str, Any]) -> bool:
    """Whether train.warmup_steps decides the warm-up, and not the JSON's scheduler."""
    return has_warmup(config) and lookup(config, "scheduler.params.warmup_num_steps") in (None, "auto")


def _warmup_steps(run: RunConfig, *, total_steps: int | None, explicit: Collection[str], notes: list[str]) -> int:
    """A preset's warm-up is meant for its own length: on a short run it must not eat the run."""
    asked = run.train.warmup_steps
    if total_steps is None:
        return asked
    if "train.warmup_steps" in explicit:
        if asked >= total_steps:
            notes.append(f"train.warmup_steps {asked} is not shorter than the run of {total_steps} steps")
        return asked
    lowered = min(asked, total_steps // WARMUP_SHARE)
    if lowered < asked:
        notes.append(f"warm-up of {lowered} steps instead of {asked}: the run has {total_steps} steps")
    return lowered


def _in_force(config: Mapping[str, Any], run: RunConfig, *, warmup_steps: int) -> RunConfig:
    scheduled = lookup(config, "scheduler.params.warmup_num_steps")
    numbers = {
        "learning_rate": float(config["optimizer"]["params"]["lr"]),
        "weight_decay": float(config["optimizer"]["params"]["weight_decay"]),
        "warmup_steps": scheduled if scheduled is not None else warmup_steps if has_warmup(config) else 0,
    }
    if run.train.min_learning_rate > numbers["learning_rate"]:
        raise ConfigError(
            f"train.min_learning_rate {run.train.min_learning_rate:g} is above optimizer.params.lr "
            f"{numbers['learning_rate']:g} of the DeepSpeed JSON: lower one or raise the other"
        )
    return run.model_copy(update={"train": run.train.model_copy(update=numbers)})


def _summary(config: Mapping[str, Any], *, stage: int, precision: str, checkpointing: bool) -> str:
    parts = [f"ZeRO stage {stage}", precision, f"activation checkpointing {'on' if checkpointing else 'off'}"]
    for what, name in (("optimizer", "offload_optimizer"), ("parameters", "offload_param")):
        device = lookup(config, f"zero_optimization.{name}.device")
        if device not in (None, "none"):
            parts.append(f"{what} offloaded to {device}")
    if lookup(config, "torch_autocast.enabled"):
        parts.append(f"torch.autocast to {lookup(config, 'torch_autocast.dtype') or 'its own low precision'}")
    clipping = config["gradient_clipping"]
    parts.append(f"gradients clipped at norm {clipping:g}" if clipping else "no clipping")
    return ", ".join(parts)
