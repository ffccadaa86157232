"""Settings of a DeepSpeed config that contradict each other, the number of ranks or the run: each with both values.

What DeepSpeed 0.19.8 itself asserts while it builds the model or takes the first step is asserted here before anything
starts; sources: runtime/engine.py, runtime/zero/{config,stage_1_and_2,stage3}.py, utils/groups.py, precision_config.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from clap_zero.config.ds_optimizer import cycles_momentum
from clap_zero.config.ds_paths import lookup
from clap_zero.config.ds_ranges import DTYPE_OF, wrong_values
from clap_zero.config.schema import RunConfig
from clap_zero.config.values import shown
from clap_zero.errors import ConfigError


def refuse_contradictions(ds: Mapping[str, Any], run: RunConfig, *, world_size: int) -> None:
    """Raises ConfigError with every contradiction, one line each.

    Args:
        ds: the whole config after `check_keys`.
        run: the run config.
        world_size: ranks.
    """
    faults = [
        *wrong_values(ds),
        *_precision(ds),
        *_gradients(ds),
        *_ranks(ds, world_size),
        *_masters(ds),
        *_others(ds, run),
    ]
    if faults:
        raise ConfigError("\n".join(faults))


def _precision(ds: Mapping[str, Any]) -> Iterator[str]:
    on = [name for name in ("bf16", "fp16") if lookup(ds, f"{name}.enabled") is True]
    if lookup(ds, "torch_autocast.enabled") is True:
        for name in on:
            yield (
                f"torch_autocast.enabled true keeps fp32 weights, and {name}.enabled true makes them {name}: set one "
                f"of them to false (--ds.{name}.enabled false)"
            )
        if lookup(ds, "zero_optimization.zero_quantized_weights"):
            yield (
                "torch_autocast.enabled true and zero_optimization.zero_quantized_weights true exclude each other: set "
                "one of them to false"
            )
    kind = DTYPE_OF.get(str(lookup(ds, "data_types.param_dtype")))
    model = on[0] if len(on) == 1 else "fp32"
    if kind not in (None, model) and not _auto_precision(ds):
        yield (
            f"data_types.param_dtype {shown(lookup(ds, 'data_types.param_dtype'))} contradicts the weights, which are "
            f"{model}: set {kind}.enabled true, or remove data_types.param_dtype"
        )
    if DTYPE_OF.get(str(lookup(ds, "data_types.buffer_dtype"))) in ("bf16", "fp16"):
        yield (
            f"data_types.buffer_dtype {shown(lookup(ds, 'data_types.buffer_dtype'))} would round BatchNorm's running "
            "statistics: remove it, they stay fp32"
        )


def _auto_precision(ds: Mapping[str, Any]) -> bool:
    return "auto" in (lookup(ds, "bf16.enabled"), lookup(ds, "fp16.enabled"))


def _gradients(ds: Mapping[str, Any]) -> Iterator[str]:
    zero = ds.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    if stage in (2, 3) and zero.get("reduce_scatter", True) is not False:
        hint = "set zero_optimization.reduce_scatter to false, or remove it"
        if ds.get("prescale_gradients") is True:
            yield f"prescale_gradients true does not go with reduce_scatter at stage {stage}: {hint}"
        elif ds.get("gradient_predivide_factor", 1) not in (1, "auto"):
            factor = ds["gradient_predivide_factor"]
            yield f"gradient_predivide_factor {shown(factor)} does not go with reduce_scatter at stage {stage}: {hint}"
    if zero.get("compute_grad_norm") is False:
        yield (
            "zero_optimization.compute_grad_norm false takes the norm away that this trainer records in each step: "
            "remove it"
        )
    if zero.get("legacy_stage1") is True:
        yield "zero_optimization.legacy_stage1 true: DeepSpeed has no old stage 1 any more: remove it"
    bucket = zero.get("allgather_bucket_size")
    if stage in (1, 2) and isinstance(bucket, int) and bucket % 2:
        yield f"zero_optimization.allgather_bucket_size is {bucket}: DeepSpeed needs an even number"


def _ranks(ds: Mapping[str, Any], world_size: int) -> Iterator[str]:
    size = lookup(ds, "zero_optimization.zero_hpz_partition_size")
    if isinstance(size, int) and size > 1 and lookup(ds, "zero_optimization.stage") == 3:
        if size > world_size:
            yield (
                f"zero_optimization.zero_hpz_partition_size {size} is more than the world size {world_size}: it "
                "is the ranks of a node; set it to those, or remove it"
            )
        elif world_size % size:
            yield (
                f"zero_optimization.zero_hpz_partition_size {size} does not divide the world size {world_size}: set it "
                "to the ranks of a node"
            )


def _masters(ds: Mapping[str, Any]) -> Iterator[str]:
    stage = lookup(ds, "zero_optimization.stage") or 0
    for path in (
        "fp16.fp16_master_weights_and_grads",
        "bf16.bf16_master_weights_and_grads",
        "bf16.bf16_optimizer_states",
    ):
        if lookup(ds, path) is True and stage == 0:
            yield f"{path} true needs zero_optimization.stage 1, 2 or 3, not {stage}"
    if lookup(ds, "bf16.bf16_optimizer_states") is True and not lookup(ds, "bf16.bf16_master_weights_and_grads"):
        yield "bf16.bf16_optimizer_states true needs bf16.bf16_master_weights_and_grads true"
    if lookup(ds, "fp16.fp16_master_weights_and_grads") is True and stage and not _offloads(ds):
        yield "fp16.fp16_master_weights_and_grads true needs zero_optimization.offload_optimizer with device cpu"


def _offloads(ds: Mapping[str, Any]) -> bool:
    return lookup(ds, "zero_optimization.offload_optimizer.device") in ("cpu", "nvme")


def _others(ds: Mapping[str, Any], run: RunConfig) -> Iterator[str]:
    kind = str(lookup(ds, "optimizer.type")).lower()
    scale = lookup(ds, "fp16.loss_scale")
    if kind == "lamb" and scale not in (None, 0, "auto"):
        yield f"optimizer.type Lamb needs a dynamic loss scale, and fp16.loss_scale is {shown(scale)}: set it to 0"
    if kind == "adamw" and lookup(ds, "optimizer.params.adam_w_mode") is False:
        yield 'optimizer.type AdamW and optimizer.params.adam_w_mode false contradict each other: use the type "Adam"'
    betas = lookup(ds, "optimizer.params.betas")
    if isinstance(betas, list) and cycles_momentum(ds):
        yield (
            f"optimizer.params.betas {shown(betas)} does nothing beside scheduler.type OneCycle, which sets them in "
            "each step: remove it (--ds.optimizer.params.betas null), or set scheduler.params.cycle_momentum to false"
        )
    if lookup(ds, "wandb.enabled") is True and run.wandb.mode != "disabled":
        yield (
            f"wandb.enabled true would start a second W&B run beside that of --wandb.mode {run.wandb.mode}, and stop "
            "training where W&B does not answer: remove the section (--ds.wandb null), and name the project with "
            "--wandb.project"
        )
