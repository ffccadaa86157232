"""Without a process group every collective is an identity."""

from __future__ import annotations

import pytest
import torch

from clap_zero.distributed import collectives


def test_one_process() -> None:
    assert collectives.rank_and_size() == (0, 1)
    assert collectives.all_gather_objects("a") == ["a"]
    assert collectives.broadcast_object({"b": 1}) == {"b": 1}
    collectives.barrier()


@pytest.mark.parametrize("name", ["all_gather", "all_reduce_sum", "all_reduce_max"])
def test_without_gradient(name: str) -> None:
    t = torch.arange(3.0, requires_grad=True)
    result = getattr(collectives, name)(t)
    assert torch.equal(result, t) and not result.requires_grad
