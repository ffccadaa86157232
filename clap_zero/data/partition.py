"""Who reads which sample, as pure functions of (sizes, sets, seed, epoch, position). Only numpy, no files, no ranks.

One epoch is ONE global sequence of all samples (`EpochOrder`). A step takes the next `global_batch` samples of it, and
`micro_positions` hands each rank its part of each micro batch. So neither the number of ranks and workers nor the
accumulation changes what a step sees, and a run may go on from any position with other numbers of all of them: no
sample of the epoch is lost or seen twice.

The remainder: an epoch has `num_samples // global_batch` steps when it is walked from its start with one global batch.
The samples after its last whole step, fewer than a global batch, are skipped; they are others in each epoch, because
each epoch has its own order.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from clap_zero.data.mixture import Part, epoch_pieces, generator, natural_pieces

_ORDER_STREAM, _SAMPLE_STREAM, _REPLACEMENT_STREAM = 0, 1, 2  # mixture.py has 3 and 4
_BLOCKS_KEPT = 4
_LOCAL_ATTEMPTS = 4


def sample_generator(
    seed: int, *, epoch: int, position: int, attempt: int = 0, purpose: int = 0
) -> np.random.Generator:
    """The source of a sample's randomness (crop, caption): the same whichever rank or worker builds the sample.

    Args:
        seed: seed of the run.
        epoch: 0-based epoch.
        position: place of the sample in the epoch's sequence.
        attempt: 0 for the sample itself, 1, 2... for the samples that replace a bad one.
        purpose: one number for each independent draw.
    """
    # Counter-based: two are made for each sample, and seeding one by a hash takes four times as long. Philox gives
    # independent streams for different (key, counter); the last word counts the draws of a stream.
    key = np.array([seed % 2**64, _SAMPLE_STREAM], dtype=np.uint64)
    counter = np.array([0, position, epoch, attempt << 32 | purpose], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


@dataclass(frozen=True)
class DataPosition:
    """Where a run stands in its data: `offset` samples of epoch `epoch` (0-based) are consumed, over all ranks."""

    epoch: int = 0
    offset: int = 0


class EpochOrder:
    """The sequence of all samples in one epoch.

    The pieces of the epoch (mixture.py; with one set of weight 1 its shards, permuted) are taken in blocks of
    `shuffle_shards`; the samples of a block are permuted among each other. Kept in memory: the pieces and their
    cumulative sizes; a block's samples are permuted on demand.

    Args:
        sizes: samples of each shard, shape (num_shards,).
        seed: seed of the run.
        epoch: 0-based epoch; each has an order of its own.
        shuffle_shards: number of shards that are mixed together.
        shuffle: False gives the natural order (shard after shard, each once whatever its weight), for evaluation.
        parts: the data sets; None: all shards are one set of weight 1.
    """

    def __init__(
        self,
        sizes: np.ndarray,
        *,
        seed: int,
        epoch: int,
        shuffle_shards: int = 16,
        shuffle: bool = True,
        parts: Sequence[Part] | None = None,
    ) -> None:
        sizes = np.asarray(sizes, dtype=np.int64)
        assert sizes.ndim == 1 and (sizes >= 0).all() and shuffle_shards >= 1
        self._seed, self._epoch, self._shuffle = seed, epoch, shuffle
        if parts is None:
            parts = (Part(0, len(sizes), int(sizes.sum())),)
        pieces = epoch_pieces(sizes, parts, seed=seed, epoch=epoch) if shuffle else natural_pieces(sizes)
        self._shards, self._firsts = pieces.shards, pieces.firsts
        self._starts = np.zeros(len(pieces.counts) + 1, dtype=np.int64)
        np.cumsum(pieces.counts, out=self._starts[1:])
        self._block_starts = np.append(self._starts[:-1:shuffle_shards], self._starts[-1])
        self._blocks: OrderedDict[int, np.ndarray] = OrderedDict()
        self.num_samples = int(self._starts[-1])

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which sample stands at each position.

        Args:
            positions: places in the sequence, shape (n,), each in [0, num_samples).

        Returns:
            Shard ids and the samples' numbers within their shards, both int64 (n,).
        """
        positions = np.asarray(positions, dtype=np.int64)
        assert positions.size == 0 or (positions.min() >= 0 and positions.max() < self.num_samples)
        mixed = positions.copy()
        if self._shuffle:
            blocks = np.searchsorted(self._block_starts, positions, side="right") - 1
            for block in np.unique(blocks):
                here = blocks == block
                start = self._block_starts[block]
                mixed[here] = start + self._permutation(int(block))[positions[here] - start]
        rows = np.searchsorted(self._starts, mixed, side="right") - 1
        return self._shards[rows], self._firsts[rows] + mixed - self._starts[rows]

    def replacement(self, position: int, attempt: int) -> int:
        """The position whose sample is tried when the one at `position` cannot be used; pure in (position, attempt).

        The first attempts stay in the position's own block, whose shards are open already; later ones go anywhere in
        the epoch, so that a block without one usable sample does not end the run.

        Args:
            position: the slot that needs a sample.
            attempt: 1-based.
        """
        low, high = 0, self.num_samples
        if attempt <= _LOCAL_ATTEMPTS:
            block = int(np.searchsorted(self._block_starts, position, side="right")) - 1
            low, high = int(self._block_starts[block]), int(self._block_starts[block + 1])
        return int(generator(self._seed, _REPLACEMENT_STREAM, self._epoch, position, attempt).integers(low, high))

    def _permutation(self, block: int) -> np.ndarray:
        if block not in self._blocks:
            size = int(self._block_starts[block + 1] - self._block_starts[block])
            self._blocks[block] = generator(self._seed, _ORDER_STREAM, self._epoch, block).permutation(size)
            while len(self._blocks) > _BLOCKS_KEPT:
                self._blocks.popitem(last=False)
        self._blocks.move_to_end(block)
        return self._blocks[block]


def steps_per_epoch(num_samples: int, global_batch: int) -> int:
    """Optimizer steps of an epoch that is walked from its start: whole global batches only."""
    return num_samples // global_batch


def settle(position: DataPosition, *, num_samples: int, global_batch: int) -> DataPosition:
    """Where the next step reads: `position`, or the start of the next epoch when less than a global batch is left."""
    if position.offset + global_batch > num_samples:
        return DataPosition(epoch=position.epoch + 1, offset=0)
    return position


def advance(position: DataPosition, *, num_samples: int, global_batch: int) -> DataPosition:
    """Where the run stands after the step that reads at `position` (which is settled first).

    Args:
        position: where the step's samples began.
        num_samples: samples of an epoch; at least `global_batch`.
        global_batch: samples of a step over all ranks and micro batches.
    """
    assert 1 <= global_batch <= num_samples
    position = settle(position, num_samples=num_samples, global_batch=global_batch)
    after = DataPosition(epoch=position.epoch, offset=position.offset + global_batch)
    return settle(after, num_samples=num_samples, global_batch=global_batch)


def micro_positions(
    position: DataPosition, *, rank: int, world_size: int, micro_batch: int, micro_index: int
) -> np.ndarray:
    """The positions in the epoch's sequence that a rank reads for one micro batch of the step at `position`.

    Args:
        position: where the step begins, settled.
        rank: rank of the reader.
        world_size: number of ranks.
        micro_batch: samples of a rank in a micro batch.
        micro_index: 0-based number of the micro batch within the step.

    Returns:
        int64 (micro_batch,).
    """
    start = position.offset + (micro_index * world_size + rank) * micro_batch
    return np.arange(start, start + micro_batch, dtype=np.int64)
