"""What the ranks of one attempt agree on in a store that an earlier attempt has used."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from clap_zero.distributed.elastic import agreed_corner


def meet(store: dist.Store, ranks: dict[int, float], *, size: int) -> dict[int, str]:
    """What each rank takes for the corner; `ranks`: rank -> seconds after which it comes."""
    corners: dict[int, str] = {}

    def come(rank: int, late_s: float) -> None:
        time.sleep(late_s)
        corners[rank] = agreed_corner(store, rank=rank, size=size, timeout=timedelta(seconds=10))

    threads = [threading.Thread(target=come, args=who) for who in ranks.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return corners


def test_each_attempt_has_a_corner_of_its_own_whoever_comes_first() -> None:
    """No count of restarts goes into it: the agents of torchrun each have their own."""
    store = dist.HashStore()
    first = meet(store, {0: 0.0, 1: 0.1, 2: 0.0}, size=3)
    # Rank 0 is late: the others find the name, their ranks' calls and rank 0's answers of the last attempt.
    second = meet(store, {0: 0.4, 1: 0.0, 2: 0.0}, size=3)
    assert set(first) == set(second) == {0, 1, 2}
    assert len(set(first.values())) == len(set(second.values())) == 1
    assert first[0] != second[0]


def test_a_rank_0_that_does_not_come_is_not_waited_for_for_ever() -> None:
    store = dist.HashStore()
    meet(store, {0: 0.0, 1: 0.0}, size=2)
    with pytest.raises(RuntimeError, match=r"rank 0 did not come within 0.3 s"):
        agreed_corner(store, rank=1, size=2, timeout=timedelta(seconds=0.3))
