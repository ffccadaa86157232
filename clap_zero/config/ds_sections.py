"""What each section of a DeepSpeed config must hold: "auto" filled, moved defaults written out, nonsense refused.

Every function takes the whole config and changes it in place; `resolve` in deepspeed.py calls them in order on a copy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal

from clap_zero.config.ds_keys import ANY, SECTION, kind_at
from clap_zero.config.ds_paths import assign, lookup
from clap_zero.config.ds_ranges import DTYPE_OF
from clap_zero.config.values import shown
from clap_zero.errors import ConfigError

FIXED_AUTO: dict[str, Any] = {
    "gradient_clipping": 1.0,
    "gradient_allreduce_op": "mean",
    "prescale_gradients": False,
    "gradient_predivide_factor": 1.0,
    "communication_data_type": "fp32",
    "data_types.grad_accum_dtype": "fp32",
    "bf16.check_grad_overflow": True,
    "fp16.auto_cast": False,
    "fp16.loss_scale": 0,
    "fp16.initial_scale_power": 16,
    "fp16.loss_scale_window": 1000,
    "fp16.hysteresis": 2,
    "fp16.min_loss_scale": 1,
    "zero_optimization.contiguous_gradients": True,
    "zero_optimization.reduce_scatter": True,
    "zero_optimization.allgather_partitions": True,
    "zero_optimization.reduce_bucket_size": 50_000_000,
    "zero_optimization.allgather_bucket_size": 50_000_000,
    "zero_optimization.round_robin_gradients": False,
    "zero_optimization.sub_group_size": 1_000_000_000,
    "zero_optimization.stage3_prefetch_bucket_size": 10_000_000,
    "zero_optimization.stage3_param_persistence_threshold": 100_000,
    "zero_optimization.stage3_max_live_parameters": 1_000_000_000,
    "zero_optimization.stage3_max_reuse_distance": 1_000_000_000,
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": False,
    "activation_checkpointing.partition_activations": False,
    "activation_checkpointing.contiguous_memory_optimization": False,
    "activation_checkpointing.cpu_checkpointing": False,
    "activation_checkpointing.profile": False,
    "activation_checkpointing.synchronize_checkpoint_boundary": False,
    "zero_allow_untested_optimizer": False,
    "wall_clock_breakdown": False,
    "memory_breakdown": False,
    "dump_state": False,
}
"""What "auto" means where neither the run config nor the machine decides; buckets (in elements) fit a CLAP, which has
150 to 200 M parameters, where DeepSpeed's own 5e8 would be a buffer larger than the model."""

FILLED_BY_RULE = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
    *("bf16.enabled", "fp16.enabled", "zero_optimization.overlap_comm"),
    *("zero_optimization.offload_optimizer.pin_memory", "zero_optimization.offload_param.pin_memory"),
    *("activation_checkpointing.number_checkpoints",),
)
"""Paths whose "auto" the functions below or batch.py fill; those of `params` are left to ds_optimizer.py."""

PRINTING = ("wall_clock_breakdown", "memory_breakdown", "dump_state", "comms_logger.verbose")
"""Keys that make DeepSpeed print, through its logger."""

OFFLOAD_DEVICES = ("none", "cpu", "nvme")


def auto_paths(ds: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Dotted paths at which "auto" has to be filled; in what is passed on to DeepSpeed it is a value of its own."""
    for name, value in ds.items():
        path = f"{prefix}{name}"
        if kind_at(path) in (ANY, SECTION) and not path.endswith(".params"):
            continue
        if isinstance(value, Mapping):
            yield from auto_paths(value, f"{path}.")
        elif isinstance(value, list) and "auto" in value:
            yield f"{path}[{value.index('auto')}]"
        elif value == "auto" and path != "data_types.keep_in_fp32_modules":
            yield path


def refuse_unfillable(ds: Mapping[str, Any]) -> None:
    """Raises ConfigError with every path whose "auto" has no rule, before any other is filled."""
    known = {*FIXED_AUTO, *FILLED_BY_RULE}
    refuse_autos([path for path in auto_paths(ds) if path not in known and ".params." not in path])


def refuse_autos(paths: Collection[str]) -> None:
    """Raises ConfigError with these paths, if there are any."""
    if paths:
        raise ConfigError(f'"auto" cannot be filled here: {", ".join(paths)}: write a value, or remove the key')


def fill_fixed_autos(ds: dict[str, Any]) -> None:
    """Writes `FIXED_AUTO` in, and removes two keys for which DeepSpeed has a rule of its own."""
    for path in list(auto_paths(ds)):
        if path in FIXED_AUTO:
            assign(ds, path, FIXED_AUTO[path])
    if lookup(ds, "activation_checkpointing.number_checkpoints") == "auto":
        del ds["activation_checkpointing"]["number_checkpoints"]
    if lookup(ds, "zero_optimization.overlap_comm") == "auto":
        del ds["zero_optimization"]["overlap_comm"]  # DeepSpeed's own rule: on at stage 3


def refuse_unsupported(ds: Mapping[str, Any]) -> None:
    """Settings that would change what is computed behind the objective's back, or that need another kind of model."""
    faults = []
    if lookup(ds, "gradient_allreduce_op") not in (None, "mean"):
        faults.append('gradient_allreduce_op must be "mean": the objective counts on averaged gradients')
    for path in ("sequence_parallel_size", "tensor_parallel.autotp_size"):
        if lookup(ds, path) not in (None, 0, 1):
            faults.append(f"{path} {lookup(ds, path)} is not supported: CLAP is trained data-parallel, remove it")
    for path in ("hybrid_engine.enabled", "data_efficiency.enabled", "autotuning.enabled", "expert_parallel.enabled"):
        if lookup(ds, path):
            faults.append(f"{path} true is not supported by this trainer: remove the section")
    if lookup(ds, "zero_optimization.zenflow") is not None:
        faults.append(
            "zero_optimization.zenflow is not supported by this trainer: it puts its update_interval in place of "
            "gradient_accumulation_steps, and ends steps by itself: remove the section"
        )
    if lookup(ds, "managed_gradient_accumulation") is False:
        faults.append(
            "managed_gradient_accumulation false would make each micro batch an optimizer step: remove the key"
        )
    if lookup(ds, "checkpoint.load_universal"):
        faults.append("checkpoint.load_universal true is not supported: runs save and load their own checkpoints")
    if lookup(ds, "activation_checkpointing.contiguous_memory_optimization"):
        faults.append(
            "activation_checkpointing.contiguous_memory_optimization needs checkpoints of one size, and the stages of "
            "the audio tower have four: set it to false"
        )
    if faults:
        raise ConfigError("\n".join(faults))


def settle_precision(
    ds: dict[str, Any], *, recorded: Mapping[str, Any], device_type: str, precisions: Collection[str]
) -> Literal["fp32", "bf16", "fp16"]:
    """Fills `enabled` of bf16 and fp16, writes out the defaults that moved between DeepSpeed versions.

    Returns:
        "fp32", "bf16" or "fp16".
    """
    for name, automatic in (("bf16", device_type != "cpu" and "bf16" in precisions), ("fp16", False)):
        section = ds.get(name)
        if section is not None and section.get("enabled", False) == "auto":
            before = lookup(recorded, f"{name}.enabled")
            section["enabled"] = before if isinstance(before, bool) else automatic
    on = [name for name in ("bf16", "fp16") if lookup(ds, f"{name}.enabled")]
    if len(on) == 2:
        raise ConfigError(
            "bf16.enabled and fp16.enabled are both true: set one of them to false (--ds.fp16.enabled false)"
        )
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    if on:
        precision = "bf16" if on[0] == "bf16" else "fp16"
    if precision not in precisions:
        other = "bf16" if precision == "fp16" and "bf16" in precisions else None
        instead = f"--ds.{other}.enabled true" if other else "fp32"
        raise ConfigError(
            f"{precision}.enabled is true, but DeepSpeed does not take {precision} on this {device_type} device: "
            f"use --ds.{precision}.enabled false and {instead}"
        )
    if precision == "bf16":
        ds["bf16"].setdefault("check_grad_overflow", True)
    stage = int(lookup(ds, "zero_optimization.stage"))
    accumulated = lookup(ds, "data_types.grad_accum_dtype")
    if precision != "fp32":
        ds.setdefault("communication_data_type", "fp32")
        if stage > 0 and accumulated is None:
            assign(ds, "data_types.grad_accum_dtype", "fp32")
        if stage == 0 and accumulated not in (None, "auto") and DTYPE_OF.get(accumulated) != precision:
            raise ConfigError(
                f"data_types.grad_accum_dtype {accumulated} with {precision} needs ZeRO: set "
                "zero_optimization.stage to 1 or more, or remove the key (DeepSpeed refuses the mix at stage 0)"
            )
        if stage == 0 and accumulated == "auto":
            ds["data_types"]["grad_accum_dtype"] = precision
    return precision


def settle_zero(ds: dict[str, Any], *, device_type: str) -> int:
    """Checks stage and offload, writes the stage out.

    Returns:
        The ZeRO stage.
    """
    zero = ds.setdefault("zero_optimization", {})
    stage = zero.setdefault("stage", 0)
    if stage not in (0, 1, 2, 3):
        raise ConfigError(f"zero_optimization.stage is {stage}: 0, 1, 2 and 3 are possible")
    faults = []
    for name in ("offload_optimizer", "offload_param"):
        section = zero.get(name)
        if section is None:
            continue
        device = section.setdefault("device", "none")
        path = f"zero_optimization.{name}"
        if device not in OFFLOAD_DEVICES:
            hint = 'write "none" in lower case' if str(device).lower() == "none" else "cpu, nvme or none"
            faults.append(f"{path}.device is {shown(device)}: {hint}")
        elif device != "none":
            faults += _offload_faults(path, section, stage)
            section.setdefault("pin_memory", device_type != "cpu")
            if section["pin_memory"] == "auto":
                section["pin_memory"] = device_type != "cpu"
    if faults:
        raise ConfigError("\n".join(faults))
    return stage


def _offload_faults(path: str, section: Mapping[str, Any], stage: int) -> Iterator[str]:
    if path.endswith("offload_param") and stage != 3:
        yield f"{path} does nothing at stage {stage}: set zero_optimization.stage 3, or remove {path}"
    elif stage == 0:
        yield f"{path} does nothing at stage 0: set zero_optimization.stage to 1, 2 or 3, or remove {path}"
    elif section["device"] == "nvme" and stage != 3:
        yield f'{path}.device "nvme" needs zero_optimization.stage 3, not {stage}: use "cpu" or stage 3'
    if section["device"] == "nvme" and not section.get("nvme_path"):
        yield f'{path}.device "nvme" needs {path}.nvme_path: a directory on the NVMe disk'
    ratio = section.get("ratio", 1.0)
    if ratio != "auto" and not 0 <= ratio <= 1:
        yield f"{path}.ratio is {ratio}: 0 to 1 is possible"
    elif ratio != "auto" and ratio < 1 and stage != 3:
        yield f"{path}.ratio {ratio} needs zero_optimization.stage 3, not {stage}"


def settle_activation_checkpointing(ds: dict[str, Any], *, device_type: str, notes: list[str]) -> bool:
    """The section, even an empty one, means on; null or absence means off."""
    section = ds.get("activation_checkpointing")
    if section is None:
        return False
    if section.get("cpu_checkpointing") is True and device_type == "cpu":
        section["cpu_checkpointing"] = False
        notes.append("activation_checkpointing.cpu_checkpointing is left off: the activations are in CPU memory anyway")
    return True


def pass_on_defaults(ds: dict[str, Any]) -> None:
    """Defaults that moved between DeepSpeed versions, or cost time for nothing, written out."""
    ds.setdefault("gradient_clipping", 1.0)
    if any(lookup(ds, path) for path in PRINTING):
        ds.setdefault("log_level", "info")  # DeepSpeed prints them at this level, and the trainer keeps it quieter
    ds.setdefault("timers", {"throughput": {"enabled": False, "synchronized": False}})
    clipping = ds["gradient_clipping"]
    if clipping != "auto" and clipping < 0:
        raise ConfigError(f"gradient_clipping is {clipping}: 0 (off) or more is needed")
