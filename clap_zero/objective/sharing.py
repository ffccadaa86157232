"""Which pairs of the global batch share a caption: how many each has, and in which blocks two of them meet."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Sharing(NamedTuple):
    """Pairs that share a caption, or a group.

    Attributes:
        sizes: (B,) int64, pairs of each pair's group, itself included.
        meets: By chunk of the rank's own pairs and chunk of all pairs, whether a pair of the one shares its group with
            another of the other; on the host, so that a block of which this is false costs no comparison.
    """

    sizes: Tensor
    meets: list[list[bool]]


def find_sharing(groups: Tensor, *, own: slice, chunk: int) -> Sharing | None:
    """Looks at the groups once, on the host: a GPU waits once for that, and not in every block.

    Args:
        groups: (B,) int64, equal for pairs that share a caption.
        own: The rank's own pairs.
        chunk: Edge of a block, from the first own pair on and from the first pair of all.

    Returns:
        None where each pair is its own group.
    """
    on_host = groups.cpu()
    _, place, counts = torch.unique(on_host, return_inverse=True, return_counts=True)
    if counts.numel() == on_host.numel():
        return None
    sizes = counts[place]
    members = (sizes > 1).nonzero().squeeze(1)
    group = torch.unique(place[members], return_inverse=True)[1]
    shape = -(-on_host.numel() // chunk), int(group.max()) + 1
    columns = _counted(torch.zeros(shape), members // chunk, group)
    ours = (members >= own.start) & (members < own.stop)
    down, across, group = (members[ours] - own.start) // chunk, members[ours] // chunk, group[ours]
    rows = _counted(torch.zeros(-(-(own.stop - own.start) // chunk), shape[1]), down, group)
    # Every member meets itself somewhere.
    meetings = rows @ columns.t() - _counted(torch.zeros(rows.shape[0], shape[0]), down, across)
    return Sharing(sizes.to(groups.device), (meetings > 0.5).tolist())


def _counted(cells: Tensor, *places: Tensor) -> Tensor:
    """`cells`, with one added at each place as often as it is named."""
    return cells.index_put_(places, torch.ones(()), accumulate=True)
