"""The similarity matrix block by block: the whole of it never exists."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from clap_zero.objective.config import ObjectiveConfig
from clap_zero.objective.sharing import Sharing

NEAR = 50.0
"""Largest distance, in nats, at which one exponential serves the rows and the columns of a block: what underflows then
is below exp(-87 + 50) of the term that counts, also in float32."""
NOTHING = -1e30
"""Stands for the largest logit where there is none: finite, so that its difference with -inf is one too."""


class Side(NamedTuple):
    """Rows or columns of the similarity matrix: a run of the global batch.

    Attributes:
        embeds: (k, d), clips or captions.
        groups: (k,) int64, or None where it does not matter which pairs share a caption.
        first: Index of the first of them in the global batch.
    """

    embeds: Tensor
    groups: Tensor | None
    first: int


class Block(NamedTuple):
    """One block of logits.

    Attributes:
        rows: Which rows, counted within their side.
        columns: Which columns.
        logits: (r, c), in a buffer that the next block overwrites; the reader may too.
        spare: (r, c), a second buffer.
        same: (r, c) bool, other pairs of an equal group; None where there are none, or groups do not matter.
        shift: Which diagonal of the block holds the pairs themselves (row i, column i of the global batch); usually
            one outside of it.
        own_rows: Their rows, counted within the side.
        own_columns: Their columns.
    """

    rows: slice
    columns: slice
    logits: Tensor
    spare: Tensor
    same: Tensor | None
    shift: int
    own_rows: slice
    own_columns: slice

    def own(self, cells: Tensor) -> Tensor:
        """View of the pairs themselves in `cells`, (r, c)."""
        return cells.diagonal(self.shift)


@dataclass(frozen=True)
class Problem:
    """What does not change over the blocks.

    Attributes:
        scale: (), factor on the cosines.
        bias: (), added to every logit, None without one.
        config: The objective.
        num_pairs: Size of the global batch.
        chunk: Edge of a block.
        narrow: Whether no two logits can be more than NEAR apart, nor any further than half of it from 0: then one
            exponential without a shift serves every block.
        sharing: Where pairs share a caption; None where none do, or it does not matter.
    """

    scale: Tensor
    bias: Tensor | None
    config: ObjectiveConfig
    num_pairs: int
    chunk: int
    narrow: bool = False
    sharing: Sharing | None = None

    def blocks(self, rows: Side, columns: Side) -> Iterator[Block]:
        """Goes over scale * rows @ columns^T + bias.

        Args:
            rows: (r, d), the rank's own.
            columns: (c, d), of all ranks.

        Yields:
            Blocks, those of the same rows one after another; the last ones are smaller.
        """
        num_rows, num_columns = rows.embeds.shape[0], columns.embeds.shape[0]
        area = min(self.chunk, num_rows) * min(self.chunk, num_columns)
        buffers = [rows.embeds.new_empty(area) for _ in range(2)]
        for row_chunk, top in enumerate(range(0, num_rows, self.chunk)):
            down = slice(top, min(top + self.chunk, num_rows))
            scaled = rows.embeds[down] * self.scale
            for column_chunk, left in enumerate(range(0, num_columns, self.chunk)):
                across = slice(left, min(left + self.chunk, num_columns))
                shape = down.stop - top, across.stop - left
                # A run of the buffer, so that the block is contiguous also where it is smaller.
                logits, spare = (buffer[: shape[0] * shape[1]].view(shape) for buffer in buffers)
                torch.mm(scaled, columns.embeds[across].t(), out=logits)
                if self.bias is not None:
                    logits.add_(self.bias)
                compared = self.sharing is not None and self.sharing.meets[row_chunk][column_chunk]
                yield _block(rows, columns, (down, across), (logits, spare), compared=compared)


def _block(
    rows: Side, columns: Side, place: tuple[slice, slice], buffers: tuple[Tensor, Tensor], *, compared: bool
) -> Block:
    """The block at `place`, with the pairs themselves found in it and, if `compared`, others of an equal group."""
    down, across = place
    shift = (rows.first + down.start) - (columns.first + across.start)
    num_own = buffers[0].diagonal(shift).numel()
    own_rows, own_columns = (
        slice(start, start + num_own) for start in (down.start + max(0, -shift), across.start + max(0, shift))
    )
    same = None
    if compared:
        assert rows.groups is not None and columns.groups is not None
        same = rows.groups[down, None] == columns.groups[None, across]
        same.diagonal(shift).fill_(False)
    return Block(down, across, *buffers, same, shift, own_rows, own_columns)
