"""Settings of a DeepSpeed config that would do nothing, as data: which stage, device or switch each of them needs.

Read from DeepSpeed 0.19.8's engine, stage_1_and_2.py, stage3.py, swap_tensor/ and activation_checkpointing/. A key that
states DeepSpeed's own default asks for nothing and passes everywhere; one that asks for something that will not happen
is refused with the way out. What a section holds that is switched off is not looked at here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from clap_zero.config.ds_paths import lookup
from clap_zero.config.values import shown
from clap_zero.errors import ConfigError


class Acting(NamedTuple):
    """Where a key of `zero_optimization` acts, and the value that asks for nothing there or elsewhere."""

    stages: tuple[int, ...]
    default: Any


_LOW, _ALL, _THREE = (1, 2), (1, 2, 3), (3,)
_STAGE3 = {
    "prefetch_bucket_size": 50_000_000,
    "param_persistence_threshold": 100_000,
    "model_persistence_threshold": 9223372036854775807,
    "max_live_parameters": 1_000_000_000,
    "max_reuse_distance": 1_000_000_000,
    "module_granularity_threshold": 0,
    "use_all_reduce_for_fetch_params": False,
    "allgather_sequential": False,
}
ACTING: dict[str, Acting] = {
    "contiguous_gradients": Acting(_ALL, True),
    "reduce_scatter": Acting(_ALL, True),
    "reduce_bucket_size": Acting(_ALL, 500_000_000),
    "overlap_comm": Acting(_ALL, False),
    "load_from_fp32_weights": Acting(_ALL, True),
    "use_multi_rank_bucket_allreduce": Acting(_LOW, True),
    "allgather_partitions": Acting(_LOW, True),
    "allgather_bucket_size": Acting(_LOW, 500_000_000),
    "compute_grad_norm": Acting(_LOW, True),
    "elastic_checkpoint": Acting(_LOW, False),
    "ignore_unused_parameters": Acting(_LOW, True),
    "round_robin_gradients": Acting(_LOW, False),
    "parameter_alignment": Acting(_LOW, False),
    "sub_group_size": Acting(_THREE, 1_000_000_000),
    "zero_hpz_partition_size": Acting(_THREE, 1),
    "zero_quantized_weights": Acting(_THREE, False),
    "zero_quantized_nontrainable_weights": Acting(_THREE, False),
    "zero_quantized_gradients": Acting(_THREE, False),
    "memory_efficient_linear": Acting(_THREE, True),
    "override_module_apply": Acting(_THREE, True),
    "pipeline_loading_checkpoint": Acting(_THREE, False),
    "log_trace_cache_warnings": Acting(_THREE, False),
    "enable_sanity_checks": Acting(_THREE, False),
    "save_muon_momentum_buffer_in_memory": Acting(_THREE, False),
    "leaf_module": Acting(_THREE, {}),
    "zenflow": Acting(_ALL, None),
    **{f"{prefix}{name}": Acting(_THREE, value) for name, value in _STAGE3.items() for prefix in ("", "stage3_")},
}

NVME_ONLY = {
    "offload_optimizer": {"buffer_count": 4, "pipeline_read": False, "pipeline_write": False, "fast_init": False},
    "offload_param": {"buffer_count": 5, "buffer_size": 100_000_000, "max_in_cpu": 1_000_000_000},
}
"""Keys of the offload sections that only the swapping to NVMe reads -> DeepSpeed's default."""

DYNAMIC_SCALE = {
    "initial_scale_power": 16,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "consecutive_hysteresis": False,
    "min_loss_scale": 1,
}
"""Keys of `fp16` that act while the loss scale is dynamic, loss_scale 0 -> DeepSpeed's default."""

AIO = {
    "block_size": 1_048_576,
    "queue_depth": 8,
    "intra_op_parallelism": 1,
    "single_submit": False,
    "overlap_events": True,
    "use_gds": False,
}
"""Keys of `aio`, which the swapping to NVMe reads -> DeepSpeed's default."""

_EXPORT = "clap-zero export gathers the weights of every stage"
DONE_ANYWAY: dict[str, str] = {
    "dataloader_drop_last": "pairs that do not fill a step are left out, others each epoch",
    "steps_per_print": "this trainer prints its own lines (--log.every_steps)",
    "zero_optimization.gather_16bit_weights_on_model_save": _EXPORT,
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": _EXPORT,
    "checkpoint.tag_validation": "runs check their own checkpoints",
}
"""Keys that ask for what happens in another way: passed, and said."""

NOTHING: dict[str, str] = {
    "activation_checkpointing.partition_activations": "it acts across tensor-parallel ranks, and here are none",
    "activation_checkpointing.number_checkpoints": "it acts with contiguous_memory_optimization, which CLAP cannot use",
    "data_parallel_size": "DeepSpeed does not read it: the launcher decides how many ranks there are",
    "disable_allgather": "DeepSpeed reads it and does nothing with it",
    "vocabulary_size": "DeepSpeed only warns by it, and the tokenizer decides it",
    "use_data_before_expert_parallelism": "CLAP has no experts",
    "seq_parallel_communication_data_type": "CLAP is trained data-parallel",
    "weight_quantization": "it is for inference",
    "pipeline": "CLAP is no pipeline module",
    "checkpoint.use_node_local_storage": "runs save their own checkpoints, on a disk that all ranks see",
    "checkpoint.parallel_write": "runs save their own checkpoints",
    "checkpoint.writer": "runs save their own checkpoints",
    "checkpoint.checkpoint_serialization": "runs save their own checkpoints",
    "datastates_ckpt": "runs save their own checkpoints",
    "compile.deepcompile": "this trainer does not compile the engine",
}
"""Keys that nothing reads in a run of this trainer, with the reason. False, zero, null and empty pass."""


def settle_effects(ds: dict[str, Any]) -> list[str]:
    """Refuses what would do nothing; removes "auto" where there is nothing to fill.

    Args:
        ds: the whole config after `check_keys`, before any "auto" is filled; changed in place.

    Returns:
        Lines for keys that are not needed because what they ask for happens anyway.

    Raises:
        ConfigError: every key without effect, one line each.
    """
    zero = ds.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    faults = [*_without_reader(ds), *_twice(zero)]
    if stage in (0, 1, 2, 3):
        faults += _of_other_stages(zero, stage)
        faults += _of_nvme(ds, zero)
    faults += _of_switches(ds, zero)
    if faults:
        raise ConfigError("\n".join(faults))
    return [f"{path} is not needed: {why}" for path, why in DONE_ANYWAY.items() if lookup(ds, path)]


def of_other_stages(zero: Mapping[str, Any], stage: Any) -> list[str]:
    """Names of the keys that do not act at this stage, whatever they hold."""
    return [name for name in zero if name in ACTING and stage not in ACTING[name].stages]


def leave_out_other_stages(ds: dict[str, Any], stage: Any) -> None:
    """`--ds.zero_optimization.stage N` means the file at another stage: what acts at its own only goes with it.

    Args:
        ds: the file's dictionary, unchecked; changed in place.
        stage: the other stage.
    """
    zero = ds.get("zero_optimization")
    if not isinstance(zero, dict) or stage == zero.get("stage"):
        return
    gone = of_other_stages(zero, stage)
    if stage in (0, 1, 2):
        gone += ["offload_param", "cpu_offload_param"]
        for key in ("ratio", "super_offload"):
            isinstance(zero.get("offload_optimizer"), dict) and zero["offload_optimizer"].pop(key, None)
    if stage == 0:
        gone += ["offload_optimizer", "cpu_offload"]
        isinstance(ds.get("data_types"), dict) and ds["data_types"].pop("grad_accum_dtype", None)
    for name in gone:
        zero.pop(name, None)


def _of_other_stages(zero: dict[str, Any], stage: int) -> Iterator[str]:
    for name in of_other_stages(zero, stage):
        value, (stages, default) = zero[name], ACTING[name]
        if value == "auto":
            del zero[name]
        elif value != default:
            others = stages[:-1]
            where = f"{', '.join(map(str, others))} or {stages[-1]}" if others else f"{stages[-1]}"
            yield _nothing(f"zero_optimization.{name}", value, f"at stage {stage}, it acts at {where}")


def _of_nvme(ds: Mapping[str, Any], zero: Mapping[str, Any]) -> Iterator[str]:
    swaps = False
    for name, keys in NVME_ONLY.items():
        section = zero.get(name) or {}
        if section.get("device") == "nvme":
            swaps = True
            continue
        for key, default in keys.items():
            if section.get(key, default) not in (default, "auto"):
                place = f"with device {shown(section.get('device', 'none'))}, it acts with nvme"
                yield _nothing(f"zero_optimization.{name}.{key}", section[key], place)
        if section.get("nvme_path") and section.get("device") == "cpu":
            yield _nothing(f"zero_optimization.{name}.nvme_path", section["nvme_path"], 'with device "cpu"')
    if not swaps:
        for key, value in (ds.get("aio") or {}).items():
            if value not in (AIO.get(key), "auto"):
                yield _nothing(f"aio.{key}", value, "without offloading to nvme")


def _of_switches(ds: Mapping[str, Any], zero: Mapping[str, Any]) -> Iterator[str]:
    """Keys that another key has switched off."""
    fp16 = ds.get("fp16") or {}
    scale = fp16.get("loss_scale", 0)
    if fp16.get("enabled") is True and scale not in (0, "auto"):
        for key, default in DYNAMIC_SCALE.items():
            if fp16.get(key, default) not in (default, "auto"):
                yield _nothing(f"fp16.{key}", fp16[key], f"with a fixed fp16.loss_scale {scale:g}, it acts with 0")
    offload = zero.get("offload_optimizer") or {}
    if offload.get("super_offload") is True and (zero.get("stage") != 3 or offload.get("device") != "cpu"):
        path = "zero_optimization.offload_optimizer.super_offload"
        yield _nothing(path, True, 'here, it acts at stage 3 with device "cpu"')
    elif offload.get("super_offload") is not True and offload.get("cpuadam_cores_perc", 0.8) not in (0.8, "auto"):
        path = "zero_optimization.offload_optimizer.cpuadam_cores_perc"
        yield _nothing(path, offload["cpuadam_cores_perc"], "without super_offload")
    if ds.get("prescale_gradients") is True and ds.get("gradient_predivide_factor", 1.0) not in (1, "auto"):
        yield _nothing("gradient_predivide_factor", ds["gradient_predivide_factor"], "with prescale_gradients true")


def _twice(zero: Mapping[str, Any]) -> Iterator[str]:
    for name in [*_STAGE3, "gather_16bit_weights_on_model_save"]:
        if name in zero and f"stage3_{name}" in zero:
            yield (
                f"zero_optimization.{name} {shown(zero[name])} and zero_optimization.stage3_{name} "
                f"{shown(zero[f'stage3_{name}'])} are one setting: keep one of them"
            )


def _without_reader(ds: Mapping[str, Any]) -> Iterator[str]:
    for path, why in NOTHING.items():
        value = lookup(ds, path)
        if value and value != "auto":
            yield f"{path} {shown(value)} does nothing: {why}; remove it (--ds.{path} null)"


def _nothing(path: str, value: Any, where: str) -> str:
    return f"{path} {shown(value)} does nothing {where}: remove it (--ds.{path} null)"
