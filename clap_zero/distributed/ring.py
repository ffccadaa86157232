"""Each rank hands a tensor to the next one: what a single link between two ranks carries."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from clap_zero.distributed.collectives import rank_and_size


def pass_on(t: Tensor) -> Tensor:
    """Sends a tensor to the next rank, the last one to the first.

    Collective: all ranks must call.

    Args:
        t: the same shape and dtype on all ranks.

    Returns:
        What the rank before this one sent, of the same shape.
    """
    rank, size = rank_and_size()
    if size == 1:
        return t.detach()
    mine, received = t.detach().contiguous(), torch.empty_like(t)
    to_next = dist.P2POp(dist.isend, mine, (rank + 1) % size)
    from_previous = dist.P2POp(dist.irecv, received, (rank - 1) % size)
    for request in dist.batch_isend_irecv([to_next, from_previous]):
        request.wait()
    return received
