"""Values of the collectives over two and four ranks."""

from __future__ import annotations

import pytest
import torch

from clap_zero.distributed import collectives
from clap_zero.testing import run_distributed


def values() -> dict[str, object]:
    rank, _ = collectives.rank_and_size()
    mine = torch.tensor([[rank, 1.0], [-rank, 2.0]])
    result = {
        "gathered": collectives.all_gather(mine),
        "sum": collectives.all_reduce_sum(mine),
        "max": collectives.all_reduce_max(mine),
        "objects": collectives.all_gather_objects({"rank": rank}),
        "broadcast": collectives.broadcast_object(f"from {rank}", source=1),
        "untouched": torch.equal(mine, torch.tensor([[rank, 1.0], [-rank, 2.0]])),
    }
    collectives.barrier()
    return result


@pytest.mark.parametrize("world", [2, 4])
def test_values(world: int) -> None:
    total = sum(range(world))
    for result in run_distributed(values, world):
        rows = [row for rank in range(world) for row in ([rank, 1.0], [-rank, 2.0])]
        assert torch.equal(result["gathered"], torch.tensor(rows))
        assert torch.equal(result["sum"], torch.tensor([[total, world], [-total, 2.0 * world]]))
        assert torch.equal(result["max"], torch.tensor([[world - 1, 1.0], [0, 2.0]]))
        assert result["objects"] == [{"rank": rank} for rank in range(world)]
        assert result["broadcast"] == "from 1"
        assert result["untouched"]
