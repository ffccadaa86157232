"""Collectives over all ranks, without gradient. Without a process group (one process) all are identities.

The only user of torch.distributed's collectives. Every function here is collective: all ranks must call it, in the
same order.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

PATIENT_POLL_S = (0.001, 0.2)
"""First and longest pause between two looks of a patient wait."""

BOARD_TIMEOUT_S = 300.0

_num_waits = 0


def rank_and_size() -> tuple[int, int]:
    """Global rank and world size; (0, 1) without a process group."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def set_timeout(timeout_s: float) -> None:
    """Sets how long collectives may wait for other ranks from now on, in seconds.

    Of all groups that there are: DeepSpeed reduces over a clone of the world, which it makes without a limit, so this
    is called once more after it.
    """
    timeout = timedelta(seconds=timeout_s)
    # torch 2.14 renamed it.
    set_of_group = getattr(dist, "set_timeout", dist.distributed_c10d._set_pg_timeout)
    for group in tuple(dist.distributed_c10d._world.pg_map):
        set_of_group(timeout, group)
    dist.distributed_c10d._get_default_store().set_timeout(timeout)


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
    """One picklable object of each rank, in rank order. Waits patiently. Collective: all ranks must call."""
    _, world = rank_and_size()
    if world == 1:
        return [o]
    patient_wait()
    objects: list[Any] = [None] * world
    dist.all_gather_object(objects, o)
    return objects


def broadcast_object(o: Any, *, source: int = 0) -> Any:
    """The picklable object of rank `source`, on all ranks. Waits patiently. Collective: all ranks must call."""
    if rank_and_size()[1] == 1:
        return o
    patient_wait()
    box = [o]
    dist.broadcast_object_list(box, src=source)
    return box[0]


def barrier() -> None:
    """Returns when all ranks have called it. Waits patiently. Collective: all ranks must call."""
    if rank_and_size()[1] > 1:
        patient_wait()
        dist.barrier()


def patient_wait() -> None:
    """Returns when all ranks have called it, however long that takes.

    A collective gives up when a rank comes later than the process group's timeout. So this stands before one that
    follows uneven work: what rank 0 prepares, an evaluation, the writing of a checkpoint. Nothing is pending while a
    rank waits here; it looks at the process group's store now and then. That a rank which is waited for still lives is
    the hub's to watch. A collective has to follow: rank 0, which keeps the store, may be the last to come and could
    end before the others have looked.

    Collective: all ranks must call.
    """
    global _num_waits
    _, world = rank_and_size()
    if world == 1:
        return
    board = Board()
    number, _num_waits = _num_waits, _num_waits + 1
    arrived, go = f"wait{number}", f"wait{number}/go"
    if board.count(arrived) == world:
        # All have left the wait before this one, or they would not be here.
        board.remove(f"wait{number - 1}", f"wait{number - 1}/go")
        board.put(go, "")
        return
    pause_s, longest_s = PATIENT_POLL_S
    while not board.has(go):
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, longest_s)


class Board:
    """Small texts that ranks leave for each other in the process group's store; nobody has to wait for anybody."""

    def __init__(self) -> None:
        # No public way leads to the store of the group; DeepSpeed and torch's own tools take this one.
        self._store = dist.PrefixStore("clap_zero", dist.distributed_c10d._get_default_store())

    def put(self, key: str, text: str) -> None:
        """Leaves a text."""
        self._store.set(key, text)

    def get(self, key: str, *, timeout_s: float = BOARD_TIMEOUT_S) -> str:
        """A text that another rank leaves, as soon as it is there.

        Raises:
            TimeoutError: It was not there in time.
        """
        try:
            self._store.wait([key], timedelta(seconds=timeout_s))
        except dist.DistStoreError as error:
            raise TimeoutError(f"no word of the other ranks for {timeout_s:g} s") from error
        return self._store.get(key).decode()

    def has(self, key: str) -> bool:
        """Whether a text is there."""
        return bool(self._store.check([key]))

    def count(self, key: str) -> int:
        """Adds one to a counter and gives its new value."""
        return int(self._store.add(key, 1))

    def remove(self, *keys: str) -> None:
        """Takes texts and counters away."""
        for key in keys:
            self._store.delete_key(key)
