"""The fp32 master weights of a DeepSpeed engine as whole tensors, a bounded number of bytes at a time.

Where the masters are depends on stage and precision:

    stage 0, fp32        the parameters themselves, the same on every rank
    stage 0, bf16, fp16  the optimizer wrapper's fp32 copies (bf16: a slice per rank)
    stages 1 and 2       each rank has a slice of one flat tensor per group
    stage 3              each rank has an equal part of every parameter, the last ones padded
    frozen parameters    no master: the parameter itself is all there is

All cases are the same thing: every rank has a stretch (start, values) of the flattened parameter, possibly empty.
A bucket of parameters is zeroed, each rank writes its stretches, and one sum over ranks completes it (x + 0 = x is
exact). So no rank ever holds more than a bucket of other ranks' weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.utils import safe_get_local_fp32_param
from torch import Tensor, nn

from clap_zero.checkpoint.layout import masters, pieces
from clap_zero.distributed.collectives import all_reduce_sum, patient_wait, rank_and_size

BUCKET_ELEMENTS = 16 << 20
"""Elements summed over ranks at once (64 MB); a larger parameter makes a bucket of its own."""


def full_shape(parameter: nn.Parameter) -> torch.Size:
    """Shape of the whole parameter, also where stage 3 left only a part of it here."""
    return getattr(parameter, "ds_shape", parameter.shape)


def _own_stretches(engine: DeepSpeedEngine) -> dict[str, tuple[int, Tensor]]:
    """This rank's part of each master: its start in the flattened parameter, and its values; no entry without any."""
    rank, _ = rank_and_size()
    stage = engine.zero_optimization_stage()
    found: dict[str, tuple[int, Tensor]] = {}
    for name, parameter in engine.module.named_parameters():
        if hasattr(parameter, "ds_id"):
            part: Any = parameter
            # DeepSpeed's own way, which knows masters on NVMe, too.
            values = safe_get_local_fp32_param(part) if parameter.requires_grad else part.ds_tensor.detach()
            start = rank * values.numel()
            found[name] = start, values.flatten()[: max(0, part.ds_numel - start)]
        elif rank == 0 and not (stage > 0 and parameter.requires_grad):  # the same everywhere: one rank's is enough
            found[name] = 0, parameter.detach().flatten()
    if stage < 3 and (stage > 0 or rank == 0):
        ours = masters(engine)
        for name, start, size, number, offset in pieces(engine):
            found[name] = start, ours[number].detach().flatten()[offset : offset + size]
    return found


def stream_masters(engine: DeepSpeedEngine, *, bucket_elements: int = BUCKET_ELEMENTS) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, fp32 tensor of the full shape) of every parameter, in the module's order.

    Collective: all ranks must iterate to the end. The tensors are views of a buffer that lives until the next one.

    Args:
        engine: A DeepSpeed engine at any stage and precision.
        bucket_elements: Elements that are summed over ranks at once.
    """
    own = _own_stretches(engine)
    bucket: list[tuple[str, nn.Parameter, int]] = []
    filled = 0
    for name, parameter in engine.module.named_parameters():
        size = full_shape(parameter).numel()
        if bucket and filled + size > bucket_elements:
            yield from _complete(bucket, own, engine.device)
            bucket, filled = [], 0
        bucket.append((name, parameter, size))
        filled += size
    if bucket:
        yield from _complete(bucket, own, engine.device)


@torch.no_grad()
def _complete(
    bucket: list[tuple[str, nn.Parameter, int]], own: Mapping[str, tuple[int, Tensor]], device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    flat = torch.zeros(sum(size for _, _, size in bucket), dtype=torch.float32, device=device)
    offset = 0
    for name, _, size in bucket:
        start, values = own.get(name, (0, flat[:0]))
        assert start + values.numel() <= size or values.numel() == 0
        flat[offset + start : offset + start + values.numel()].copy_(values)
        offset += size
    patient_wait()  # rank 0 is still writing what it got last
    flat = all_reduce_sum(flat)
    for (name, parameter, _), values in zip(bucket, flat.split([size for _, _, size in bucket]), strict=True):
        yield name, values.view(full_shape(parameter))
