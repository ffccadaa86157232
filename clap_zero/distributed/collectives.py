"""Collectives over all ranks, with and without gradient. Without a process group (one process) all are identities.

The only user of torch.distributed's collectives. Every function here is collective: all ranks must call it, in the
same order.

Gradient convention. The global loss is the mean over ranks of each rank's share, and the data-parallel engine averages
gradients over ranks. So autograd on a rank has to give the gradient of the SUM of all shares with respect to what the
rank put in; that is what summing over ranks in the backward of a gather does.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def rank_and_size() -> tuple[int, int]:
    """Global rank and world size; (0, 1) without a process group."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def all_gather(t: Tensor) -> Tensor:
    """Concatenates the ranks' tensors in rank order, without gradient.

    Args:
        t: (b, ...), the same shape and dtype on all ranks.

    Returns:
        (world * b, ...).

    Collective: all ranks must call.
    """
    _, world = rank_and_size()
    if world == 1:
        return t.detach()
    mine = t.detach().contiguous()
    if mine.dim() == 0:
        raise ValueError("all_gather needs a tensor with a batch axis")
    gathered = mine.new_empty((world * mine.shape[0], *mine.shape[1:]))
    # torch 2.14 renamed it.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(gathered, mine)
    return gathered


def all_reduce_sum(t: Tensor) -> Tensor:
    """The sum over ranks as a new tensor of the same shape, without gradient. Collective: all ranks must call."""
    return _reduced(t, dist.ReduceOp.SUM)


def all_reduce_max(t: Tensor) -> Tensor:
    """The largest over ranks, element by element, as a new tensor. Collective: all ranks must call."""
    return _reduced(t, dist.ReduceOp.MAX)


def _reduced(t: Tensor, operation: Any) -> Tensor:
    """A new tensor with `operation` applied over ranks; the argument stays as it is."""
    if rank_and_size()[1] == 1:
        return t.detach()
    result = t.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(result, op=operation)
    return result


def all_gather_objects(o: Any) -> list[Any]:
    """One picklable object of each rank, in rank order. Collective: all ranks must call."""
    _, world = rank_and_size()
    if world == 1:
        return [o]
    objects: list[Any] = [None] * world
    dist.all_gather_object(objects, o)
    return objects


def broadcast_object(o: Any, *, source: int = 0) -> Any:
    """The picklable object of rank `source`, on all ranks. Collective: all ranks must call."""
    if rank_and_size()[1] == 1:
        return o
    box = [o]
    dist.broadcast_object_list(box, src=source)
    return box[0]


def barrier() -> None:
    """Returns when all ranks have called it. Collective: all ranks must call."""
    if rank_and_size()[1] > 1:
        dist.barrier()


class _GatherWithGradient(torch.autograd.Function):
    """Forward: concatenation over ranks. Backward: sum over ranks of the gradient, own rows."""

    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:
        ctx.num_rows = t.shape[0]
        return all_gather(t)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        rank, _ = rank_and_size()
        # One all-reduce and a slice instead of a reduce-scatter: gloo and NCCL both have it, and embeddings are small.
        return all_reduce_sum(gradient)[rank * ctx.num_rows : (rank + 1) * ctx.num_rows]


def all_gather_with_gradient(t: Tensor) -> Tensor:
    """Concatenates the ranks' tensors in rank order, differentiably.

    Args:
        t: (b, ...), the same shape on all ranks.

    Returns:
        (world * b, ...); its backward gives each rank the sum over ranks of the gradient of its rows.

    Collective in forward and backward: all ranks must call.
    """
    return t if rank_and_size()[1] == 1 else _GatherWithGradient.apply(t)
