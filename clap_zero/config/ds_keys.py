"""The keys of DeepSpeed's JSON, as data: what DeepSpeed 0.19.8 reads, and what kind of value each key takes.

DeepSpeed itself passes unknown top-level keys and typos in several sections over in silence. Written down from its
runtime/config.py, runtime/zero/config.py, offload_config.py, precision_config.py, lr_schedules.py and engine.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from clap_zero.config.ds_optimizer_params import OPTIMIZER_PARAMS
from clap_zero.config.ds_side_keys import ANY, BOOL, FLOAT, INT, LIST, SECTION, SIDE_KEYS, STR, TEXTS
from clap_zero.config.ds_torch_schedules import TORCH_SCHEDULES

__all__ = ["ANY", "BOOL", "FLOAT", "INT", "KEYS", "LIST", "REMOVED", "SECTION", "STR", "TEXTS", "all_paths", "table_at"]

_OFFLOAD = {"device": STR, "nvme_path": STR, "buffer_count": INT, "pin_memory": BOOL}

ZERO = {
    "stage": INT,
    "contiguous_gradients": BOOL,
    "reduce_scatter": BOOL,
    "reduce_bucket_size": INT,
    "use_multi_rank_bucket_allreduce": BOOL,
    "allgather_partitions": BOOL,
    "allgather_bucket_size": INT,
    "overlap_comm": BOOL,
    "compute_grad_norm": BOOL,
    "load_from_fp32_weights": BOOL,
    "elastic_checkpoint": BOOL,
    "offload_param": {**_OFFLOAD, "buffer_size": INT, "max_in_cpu": INT},
    "offload_optimizer": {
        **_OFFLOAD,
        "pipeline_read": BOOL,
        "pipeline_write": BOOL,
        "fast_init": BOOL,
        "ratio": FLOAT,
        "super_offload": BOOL,
        "cpuadam_cores_perc": FLOAT,
    },
    "zenflow": SECTION,
    "sub_group_size": INT,
    "ignore_unused_parameters": BOOL,
    "legacy_stage1": BOOL,
    "round_robin_gradients": BOOL,
    "parameter_alignment": BOOL,
    "zero_hpz_partition_size": INT,
    "zero_quantized_weights": BOOL,
    "zero_quantized_nontrainable_weights": BOOL,
    "zero_quantized_gradients": BOOL,
    "memory_efficient_linear": BOOL,
    "pipeline_loading_checkpoint": BOOL,
    "override_module_apply": BOOL,
    "log_trace_cache_warnings": BOOL,
    "enable_sanity_checks": BOOL,
    "save_muon_momentum_buffer_in_memory": BOOL,
    "leaf_module": SECTION,
}
for _name, _kind in (
    ("prefetch_bucket_size", INT),
    ("param_persistence_threshold", INT),
    ("model_persistence_threshold", INT),
    ("max_live_parameters", INT),
    ("max_reuse_distance", INT),
    ("gather_16bit_weights_on_model_save", BOOL),
    ("module_granularity_threshold", INT),
    ("use_all_reduce_for_fetch_params", BOOL),
    ("allgather_sequential", BOOL),
):
    ZERO[f"stage3_{_name}"] = ZERO[_name] = _kind  # DeepSpeed takes both spellings

_WARMUP = {"warmup_num_steps": INT, "warmup_type": STR, "last_batch_iteration": INT}
SCHEDULER_PARAMS: dict[str, dict[str, str]] = {
    "WarmupLR": {**_WARMUP, "warmup_min_lr": FLOAT, "warmup_max_lr": FLOAT},
    "WarmupDecayLR": {**_WARMUP, "warmup_min_lr": FLOAT, "warmup_max_lr": FLOAT, "total_num_steps": INT},
    "WarmupCosineLR": {**_WARMUP, "warmup_min_ratio": FLOAT, "cos_min_ratio": FLOAT, "total_num_steps": INT},
    "OneCycle": {
        **dict.fromkeys(("cycle_first_step_size", "cycle_second_step_size", "decay_step_size"), INT),
        **dict.fromkeys(("cycle_first_stair_count", "cycle_second_stair_count", "last_batch_iteration"), INT),
        **dict.fromkeys(("cycle_min_lr", "cycle_max_lr", "decay_lr_rate"), FLOAT),
        **dict.fromkeys(("cycle_min_mom", "cycle_max_mom", "decay_mom_rate"), FLOAT),
        "cycle_momentum": BOOL,
    },
    "LRRangeTest": {
        "lr_range_test_min_lr": FLOAT,
        "lr_range_test_step_size": INT,
        "lr_range_test_step_rate": FLOAT,
        "lr_range_test_staircase": BOOL,
        "last_batch_iteration": INT,
    },
}
"""`scheduler.params` of DeepSpeed's own schedules, by type."""

KEYS: dict[str, Any] = {
    "train_batch_size": INT,
    "train_micro_batch_size_per_gpu": INT,
    "gradient_accumulation_steps": INT,
    "managed_gradient_accumulation": BOOL,
    "steps_per_print": INT,
    "dump_state": BOOL,
    "disable_python_gc": BOOL,
    "disable_allgather": BOOL,
    "communication_data_type": STR,
    "seq_parallel_communication_data_type": STR,
    "prescale_gradients": BOOL,
    "gradient_predivide_factor": FLOAT,
    "gradient_allreduce_op": STR,
    "gradient_clipping": FLOAT,
    "zero_optimization": ZERO,
    "zero_allow_untested_optimizer": BOOL,
    "zero_force_ds_cpu_optimizer": BOOL,
    "bf16": {
        "enabled": BOOL,
        "immediate_grad_update": BOOL,
        "check_grad_overflow": BOOL,
        "bf16_master_weights_and_grads": BOOL,
        "bf16_optimizer_states": BOOL,
    },
    "fp16": {
        "enabled": BOOL,
        "auto_cast": BOOL,
        "loss_scale": FLOAT,
        "initial_scale_power": INT,
        "loss_scale_window": INT,
        "hysteresis": INT,
        "consecutive_hysteresis": BOOL,
        "min_loss_scale": INT,
        "fp16_master_weights_and_grads": BOOL,
    },
    "torch_autocast": {"enabled": BOOL, "dtype": STR, "lower_precision_safe_modules": TEXTS},
    "data_types": {"grad_accum_dtype": STR, "param_dtype": STR, "buffer_dtype": STR, "keep_in_fp32_modules": TEXTS},
    "optimizer": {"type": STR, "params": ANY, "legacy_fusion": BOOL},
    "scheduler": {"type": STR, "params": ANY},
    "activation_checkpointing": {
        "partition_activations": BOOL,
        "number_checkpoints": INT,
        "contiguous_memory_optimization": BOOL,
        "cpu_checkpointing": BOOL,
        "profile": BOOL,
        "synchronize_checkpoint_boundary": BOOL,
    },
    "checkpoint": {
        "tag_validation": STR,
        "load_universal": BOOL,
        "use_node_local_storage": BOOL,
        "parallel_write": SECTION,
        "checkpoint_serialization": BOOL,
        "writer": SECTION,
    },
    "wall_clock_breakdown": BOOL,
    "memory_breakdown": BOOL,
    "dataloader_drop_last": BOOL,
    "use_data_before_expert_parallelism": BOOL,
    "sequence_parallel_size": INT,
    "data_parallel_size": INT,
    "vocabulary_size": INT,
    "log_level": STR,
    **SIDE_KEYS,
}

REMOVED: dict[str, str] = {
    "aio.thread_count": "DeepSpeed calls it intra_op_parallelism now and passes the old name over",
    "amp": 'Apex is gone from DeepSpeed: use "bf16", "fp16" or "torch_autocast"',
    "compression_training": "DeepSpeed removed its compression library in 0.19.7: delete the section",
    "curriculum_learning": "DeepSpeed removed it in 0.19.8: delete the section",
    "eigenvalue": "DeepSpeed removed it with quantize_training: delete the section",
    "elasticity": "DeepSpeed removed elastic training in 0.19.8: delete the section and set the batch sizes",
    "graph_harvesting": "DeepSpeed removed it: delete the key",
    "nebula": "DeepSpeed removed it in 0.19.7: delete the section",
    "progressive_layer_drop": "DeepSpeed removed it: delete the section",
    "quantize_training": "DeepSpeed removed it: delete the section",
    "sparse_attention": "DeepSpeed removed it: delete the section",
    "sparse_gradients": "DeepSpeed removed it: delete the key",
    "zero_optimization.mics_shard_size": "DeepSpeed removed MiCS in 0.19.7: use zero_hpz_partition_size",
    "zero_optimization.mics_hierarchical_params_gather": "DeepSpeed removed MiCS in 0.19.7: delete the key",
    "zero_optimization.zeropp_loco_param": "DeepSpeed removed LoCo: delete the key",
    "zero_optimization.cpu_offload_use_pin_memory": 'write "pin_memory" into the offload section',
    "optimizer.params.max_grad_norm": 'write "gradient_clipping" at the top level',
}
"""Keys that DeepSpeed refuses or will refuse, with the way out."""

OLD_NAMES: dict[str, tuple[str, Any]] = {
    "bfloat16": ("bf16", None),
    "zero_optimization.cpu_offload": ("zero_optimization.offload_optimizer", {"device": "cpu"}),
    "zero_optimization.cpu_offload_param": ("zero_optimization.offload_param", {"device": "cpu"}),
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        None,
    ),
}
"""Keys that DeepSpeed still takes under an old name -> the new one, and what true stands for there (None: itself)."""

OPTIMIZERS = {
    **dict.fromkeys(("adam", "adamw", "adagrad", "lion", "muon"), True),
    **dict.fromkeys(("lamb",), False),
    **dict.fromkeys(("SGD", "RMSprop", "NAdam", "RAdam", "Adamax", "Adadelta", "ASGD", "Adafactor"), False),
}
"""Optimizer types, lower case where DeepSpeed ignores case -> whether ZeRO takes them without being told to."""

REMOVED_OPTIMIZERS = ("onebitadam", "zerooneadam", "onebitlamb")
MUP_OPTIMIZERS = ("muadam", "muadamw", "musgd")
"""They scale their rates by the base shapes that the mup package writes into a model: no ClapModel has them."""


def all_paths(keys: Mapping[str, Any] = KEYS, prefix: str = "") -> Iterator[str]:
    """Every known dotted path, sections included."""
    for name, kind in keys.items():
        yield f"{prefix}{name}"
        if isinstance(kind, Mapping):
            yield from all_paths(kind, f"{prefix}{name}.")
    if not prefix:
        names = dict.fromkeys(name for params in OPTIMIZER_PARAMS.values() for name in params)
        yield from (f"optimizer.params.{name}" for name in names)
        schedules = {**SCHEDULER_PARAMS, **TORCH_SCHEDULES}.values()
        yield from (f"scheduler.params.{name}" for params in schedules for name in params)


def table_at(path: str, ds: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The closed table of keys of the section at a dotted path, or None where everything is passed on.

    Args:
        ds: the whole JSON; the type of optimizer and scheduler decides what their `params` may hold.
    """
    if path in ("optimizer.params", "scheduler.params"):
        section = ds.get(path.partition(".")[0])
        kind = section.get("type") if isinstance(section, Mapping) else None
        if path == "scheduler.params":
            return SCHEDULER_PARAMS.get(str(kind), TORCH_SCHEDULES.get(str(kind)))
        return OPTIMIZER_PARAMS.get("adamw" if kind is None else str(kind).lower())
    table = kind_at(path)
    return table if isinstance(table, Mapping) else None


def kind_at(path: str) -> Any:
    """What stands at a dotted path of KEYS: a kind, a table, or None where there is nothing."""
    table: Any = KEYS
    for name in path.split(".") if path else ():
        table = table.get(name) if isinstance(table, Mapping) else None
    return table
