"""Buffers of the ranks: which are kept, and how BatchNorm statistics that drifted apart become one model's.

DeepSpeed never broadcasts or averages buffers. With `model.batch_norm: local` every rank has its own running
statistics; a resumed run needs each rank's own, and an exported or evaluated model needs one set for all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from clap_zero.distributed.collectives import all_reduce_max, all_reduce_sum, patient_wait, rank_and_size

_SAVED = "buffer."
"""In front of the names in a rank's file."""

MEAN, VARIANCE, COUNT = "running_mean", "running_var", "num_batches_tracked"


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers that belong into a state dict, by their full names in module order."""
    found: dict[str, Tensor] = {}
    for prefix, part in module.named_modules():
        for name, buffer in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


def merge_over_ranks(buffers: dict[str, Tensor]) -> dict[str, Tensor]:
    """One set of buffers for all ranks. Collective: all ranks must call.

    Running means are averaged over the ranks. A running variance becomes the average of the ranks' variances plus the
    variance of the ranks' means (the law of total variance for ranks with equally many samples). Counts of batches take
    the largest. Everything else is the same on all ranks by construction and taken as it is. Statistics that are equal
    on all ranks come out bit-equal, because the averages are taken in float64.

    Returns:
        New tensors with the shapes and types given.
    """
    merged = {name: buffer.detach().clone() for name, buffer in buffers.items()}
    _, world_size = rank_and_size()
    means = [name for name in merged if name.rpartition(".")[2] == MEAN]
    if world_size == 1 or not means:
        return merged
    variances = [name.removesuffix(MEAN) + VARIANCE for name in means]
    counts = [name for name in merged if name.rpartition(".")[2] == COUNT]
    width = sum(merged[name].numel() for name in means)
    local = torch.cat([merged[name].double().flatten() for name in means + variances])
    patient_wait()  # in a checkpoint rank 0 is still writing the weights
    average = all_reduce_sum(local.clone()) / world_size
    between = all_reduce_sum((local[:width] - average[:width]).square()) / world_size
    average[width:] += between
    for name, values in zip(
        means + variances, average.split([merged[n].numel() for n in means + variances]), strict=True
    ):
        merged[name].copy_(values.view_as(merged[name]))
    if counts:
        largest = all_reduce_max(torch.stack([merged[name] for name in counts]))
        for name, value in zip(counts, largest, strict=True):
            merged[name].copy_(value)
    return merged


@contextmanager
def merged_statistics(module: nn.Module) -> Iterator[None]:
    """Gives the module the statistics of an export within the block, and its own back afterwards.

    Collective on entry: all ranks must call.
    """
    own = persistent_buffers(module)
    kept = {name: buffer.detach().clone() for name, buffer in own.items()}
    try:
        for name, value in merge_over_ranks(own).items():
            own[name].copy_(value)
        yield
    finally:
        for name, value in kept.items():
            own[name].copy_(value)


def saved_buffers(module: nn.Module) -> dict[str, Tensor]:
    """What the file of a rank holds: its buffers by the names that they have there."""
    return {f"{_SAVED}{name}": buffer.detach() for name, buffer in persistent_buffers(module).items()}


def read_buffers(checkpoint: Path, own: Path | None) -> dict[str, Tensor]:
    """The buffers of a checkpoint by name.

    Args:
        checkpoint: Its directory.
        own: The file of this rank; None for one set for any number of ranks, which is the consolidated weights'.
    """
    found: dict[str, Tensor] = {}
    with safe_open(own or next(iter(sorted(checkpoint.glob("rank-*.safetensors")))), framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            found[name.removeprefix(_SAVED)] = file.get_tensor(name)
    for weights in () if own else sorted(checkpoint.glob("model-*.safetensors")):
        with safe_open(weights, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in found.keys() & set(file.keys())}
    return found


@torch.no_grad()
def restore_buffers(module: nn.Module, saved: Mapping[str, Tensor]) -> str | None:
    """Gives a module its buffers; returns what does not fit, if anything."""
    buffers = persistent_buffers(module)
    differing = buffers.keys() ^ saved.keys()
    if differing:
        return f"its buffers and the model's are not the same: {', '.join(sorted(differing)[:3])}"
    for name, buffer in buffers.items():
        if saved[name].shape != buffer.shape:
            return f"{name} has shape {tuple(saved[name].shape)} there and {tuple(buffer.shape)} in the model"
        buffer.copy_(saved[name])
    return None
