"""The keys of the sections beside training: monitors, profilers, timers, files. Kinds as in ds_keys.py.

Written down from DeepSpeed 0.19.8's monitor/config.py, profiling/config.py, comm/config.py, compile/config.py and
swap_tensor/aio_config.py. DeepSpeed passes a misspelt key of flops_profiler or aio over, and stops at one of a monitor
when the model is built.
"""

from __future__ import annotations

from typing import Any

INT, FLOAT, BOOL, STR, LIST = "a whole number", "a number", "true or false", "a text", "a list"
TEXTS = "a list of texts"
SECTION = "a section in braces"
"""A section that is passed on untouched."""
ANY = "anything"
"""A key that is passed on untouched."""

SIDE_KEYS: dict[str, Any] = {
    "tensorboard": {"enabled": BOOL, "output_path": STR, "job_name": STR},
    "csv_monitor": {"enabled": BOOL, "output_path": STR, "job_name": STR},
    "wandb": {"enabled": BOOL, "group": STR, "team": STR, "project": STR},
    "comet": {
        "enabled": BOOL,
        "samples_log_interval": INT,
        "online": BOOL,
        **dict.fromkeys(("project", "workspace", "api_key", "experiment_name", "experiment_key", "mode"), STR),
    },
    "flops_profiler": {
        "enabled": BOOL,
        "recompute_fwd_factor": FLOAT,
        "profile_step": INT,
        "module_depth": INT,
        "top_modules": INT,
        "detailed": BOOL,
        "output_file": STR,
    },
    "comms_logger": {"enabled": BOOL, "prof_all": BOOL, "prof_ops": LIST, "verbose": BOOL, "debug": BOOL},
    "timers": {"throughput": {"enabled": BOOL, "synchronized": BOOL}},
    "aio": {
        "block_size": INT,
        "queue_depth": INT,
        "intra_op_parallelism": INT,
        "single_submit": BOOL,
        "overlap_events": BOOL,
        "use_gds": BOOL,
    },
    "compile": {
        "free_activation_threshold": INT,
        "passes": LIST,
        **dict.fromkeys(
            (
                *("deepcompile", "autoep_non_moe", "free_activation", "offload_activation", "double_buffer"),
                *("offload_activation_pin_memory", "offload_opt_states", "symmetric_memory", "debug_log"),
                *("offload_parameters", "sync_before_reduce", "sync_after_reduce", "sync_before_allgather"),
                *("sync_after_allgather", "keep_int_input_tensors", "keep_all_input_tensors"),
            ),
            BOOL,
        ),
    },
    "pipeline": {
        "stages": ANY,
        "partition": STR,
        "seed_layers": BOOL,
        "activation_checkpoint_interval": INT,
        "pipe_partitioned": BOOL,
        "grad_partitioned": BOOL,
    },
    **dict.fromkeys(
        ("autotuning", "hybrid_engine", "data_efficiency", "weight_quantization", "tensor_parallel", "expert_parallel"),
        SECTION,
    ),
    "datastates_ckpt": SECTION,
}
