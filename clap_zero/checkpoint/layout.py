"""Where each element of each parameter lies in the optimizer of a rank: one description for every stage and precision.

Whatever the stage, DeepSpeed's optimizer works on a list of fp32 tensors, the masters, and keeps its moments beside
each of them in the same shape:

    stage 0, fp32           the parameters themselves, on every rank
    stage 0, bf16 and fp16  a copy per parameter, or one flat copy per group, on every rank
    stages 1 and 2          a slice of one flat tensor per group; a parameter may lie across the slices of two ranks
    stage 3                 an equal part of every parameter, the last ones padded, in flat tensors of some size

So a rank's layout is a list of pieces, and two layouts are compared piece by piece; see relayout.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from deepspeed import DeepSpeedEngine
from torch import Tensor

from clap_zero.distributed.collectives import rank_and_size

_FLAT_MASTERS = (
    "fp32_partitioned_groups_flat",  # stage 3
    "single_partition_of_fp32_groups",  # stages 1 and 2
    "fp32_groups_flat_partition",  # stage 1 in bf16 with fp32 accumulation
    "fp32_groups_flat",  # stage 0, FusedAdam
)


class Piece(NamedTuple):
    """A stretch of a parameter within one of a rank's masters.

    Attributes:
        name: Of the parameter.
        start: First element, in the flattened parameter.
        size: Elements.
        master: Number of the master tensor.
        offset: First element, in the flattened master.
    """

    name: str
    start: int
    size: int
    master: int
    offset: int


def base_optimizer(engine: DeepSpeedEngine) -> Any:
    """The optimizer that DeepSpeed's wrapper, if there is one, holds."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def masters(engine: DeepSpeedEngine) -> list[Tensor]:
    """This rank's master tensors, in the order in which the optimizer's state dict counts them."""
    optimizer = engine.optimizer
    for attribute in _FLAT_MASTERS:
        if hasattr(optimizer, attribute):
            return list(getattr(optimizer, attribute))
    if hasattr(optimizer, "fp32_groups"):  # stage 0 in half precision, other optimizers
        return [master for group in optimizer.fp32_groups for master in group]
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def pieces(engine: DeepSpeedEngine) -> Iterator[Piece]:
    """What of which trained parameter lies where in this rank's masters; at stage 0 everything, on every rank."""
    optimizer = engine.optimizer
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        yield from _equal_parts(optimizer.fp16_groups, names)
    elif engine.zero_optimization_stage() > 0:
        yield from _slices(optimizer, masters(engine), names)
    elif hasattr(optimizer, "fp32_groups_flat"):
        for number, group in enumerate(optimizer.fp16_groups):
            offset = 0
            for parameter in group:
                yield Piece(names[id(parameter)], 0, parameter.numel(), number, offset)
                offset += parameter.numel()
    else:
        groups = getattr(optimizer, "fp16_groups", None) or [group["params"] for group in optimizer.param_groups]
        for number, parameter in enumerate(parameter for group in groups for parameter in group):
            if parameter.requires_grad:
                yield Piece(names[id(parameter)], 0, parameter.numel(), number, 0)


def _equal_parts(groups: list[list[Any]], names: Mapping[int, str]) -> Iterator[Piece]:
    """Stage 3. Parts are equal and the last ones padded: with one element on two ranks the second has padding only."""
    rank, _ = rank_and_size()
    for number, group in enumerate(groups):
        offset = 0
        for parameter in group:
            part = parameter.partition_numel()
            size = min(part, parameter.ds_numel - rank * part)
            if size > 0:
                yield Piece(names[id(parameter)], rank * part, size, number, offset)
            offset += part


def _slices(optimizer: Any, ours: list[Tensor], names: Mapping[int, str]) -> Iterator[Piece]:
    """Stages 1 and 2. Not by DeepSpeed's `_hp_mapping`, which is wrong with round_robin_gradients (seen in 0.19.8)."""
    rank, _ = rank_and_size()
    groups = optimizer.bf16_groups if hasattr(optimizer, "bf16_groups") else optimizer.round_robin_bit16_groups
    for number, group in enumerate(groups):
        low = rank * ours[number].numel()
        high = low + ours[number].numel()
        sizes = [parameter.numel() for parameter in group]
        offsets = list(accumulate(sizes, initial=0))
        if hasattr(optimizer, "round_robin_bit16_offsets"):  # with padding between them, if it is asked for
            offsets = optimizer.round_robin_bit16_offsets[number]
        for parameter, size, offset in zip(group, sizes, offsets, strict=False):
            start, end = max(low, offset), min(high, offset + size)
            if start < end:
                yield Piece(names[id(parameter)], start - offset, end - start, number, start - low)


def why_fixed(config: Mapping[str, Any]) -> str | None:
    """Why the optimizer state of a run with this DeepSpeed configuration stays with its ranks and stage, if it does.

    Args:
        config: The resolved configuration.
    """
    zero = config.get("zero_optimization", {})
    offload = zero.get("offload_optimizer") or {}
    for name in ("offload_optimizer", "offload_param"):
        if (zero.get(name) or {}).get("device") == "nvme":
            return f"zero_optimization.{name} is on NVMe"
    if offload.get("super_offload") or offload.get("ratio", 1.0) != 1.0:
        return "zero_optimization.offload_optimizer splits the optimizer over CPU and GPU"
    if zero.get("zero_hpz_partition_size", 1) > 1:
        return "zero_optimization.zero_hpz_partition_size keeps a second partition"
    if zero.get("elastic_checkpoint"):
        return "zero_optimization.elastic_checkpoint writes other files"
    kind = str((config.get("optimizer") or {}).get("type", ""))
    if kind.lower() in ("muon", "adafactor"):
        return f"{kind} works on whole matrices"
    for precision in ("bf16", "fp16"):
        if (config.get(precision) or {}).get(f"{precision}_master_weights_and_grads"):
            return f"{precision}.{precision}_master_weights_and_grads leaves no fp32 masters"
    return None


def odd_state(engine: DeepSpeedEngine) -> str | None:
    """A state of the optimizer that is neither one number per element nor one for all, if there is one."""
    optimizer = base_optimizer(engine)
    for master in masters(engine):
        for key, value in optimizer.state.get(master, {}).items():
            if not is_scalar(value) and not (torch.is_tensor(value) and value.numel() == master.numel()):
                return f"{type(optimizer).__name__} keeps {key}, which is not one number per weight"
    return None


def is_scalar(value: Any) -> bool:
    """Whether a state is one number for all elements, such as Adam's step."""
    return isinstance(value, (int, float)) or (torch.is_tensor(value) and value.dim() == 0)
