"""What travels from the loader to the training step and the evaluation."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from clap_zero.audio import shared
from clap_zero.audio.clips import ClipBatch, FeatureConfig
from clap_zero.data.partition import DataPosition
from clap_zero.data.places import ReadPolicy

AHEAD_BYTES = 2_000_000_000
"""Host memory of a rank that waveforms may take which are prepared ahead."""


@dataclass(frozen=True)
class LoaderPlan:
    """Everything that decides what a rank reads, and how its samples are made.

    Attributes:
        rank: rank of the reader.
        world_size: number of ranks.
        micro_batch: samples of a rank in a micro batch (in an evaluation batch).
        features: how clips are cut; its `truncation` and `max_samples` are read.
        accumulation: micro batches of a step. Evaluation ignores it.
        position: where the first step begins. Evaluation ignores it.
        seed: seed of the run: order, crops, captions.
        shuffle_shards: shards that are mixed together.
        workers: loader processes of this rank; 0 builds batches in the calling process.
        tokenizer_path: directory with vocab.json and merges.txt or tokenizer.json; None: the embedded RoBERTa.
        max_caption_tokens: longest caption, special tokens included.
        policy: how remote shards are read.
        blacklist: files that name samples which training leaves out; see `blacklist.Blacklist`.
        max_seconds: longest part of a clip that is decoded, in seconds.
        max_bad_fraction: more unusable samples than this part of an epoch end the run.
        prefetch: batches that a worker prepares ahead.
        pin_memory: copy batches to page-locked memory (only where CUDA is there).
        stall_timeout_s: seconds without a batch from the workers after which they are given up; None: never.
    """

    rank: int
    world_size: int
    micro_batch: int
    features: FeatureConfig
    accumulation: int = 1
    position: DataPosition = field(default_factory=DataPosition)
    seed: int = 0
    shuffle_shards: int = 16
    workers: int = 0
    tokenizer_path: str | None = None
    max_caption_tokens: int = 77
    policy: ReadPolicy = field(default_factory=ReadPolicy)
    blacklist: tuple[str, ...] = ()
    max_seconds: float = 60.0
    max_bad_fraction: float = 0.05
    prefetch: int = 2
    pin_memory: bool = False
    stall_timeout_s: float | None = 540.0

    @property
    def global_batch(self) -> int:
        """Samples of a step over all ranks and micro batches."""
        return self.micro_batch * self.accumulation * self.world_size


def batches_ahead(
    features: FeatureConfig, *, micro_batch: int, accumulation: int, workers: int, max_seconds: float
) -> int:
    """Batches for a worker to prepare ahead where a step draws all of its own at once, and then none for long.

    Args:
        features: how clips are cut.
        micro_batch: samples of a batch.
        accumulation: batches of a step.
        workers: loader processes of the rank.
        max_seconds: longest part of a clip that is decoded, in seconds.

    Returns:
        Enough for the next step, as far as `AHEAD_BYTES` go; the loader's usual number at least.
    """
    num_samples = float(features.max_samples)
    if features.truncation == "fusion":  # its views are made of the whole clip, where otherwise a crop travels
        num_samples = max(num_samples, max_seconds * features.sample_rate_hz)
    batch_bytes = torch.int16.itemsize * num_samples * micro_batch
    fitting = int(AHEAD_BYTES / (batch_bytes * max(1, workers)))
    return max(LoaderPlan.prefetch, min(fitting, -(-accumulation // max(1, workers)) + 1))


def _without_clips(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != "clips"}


def _outgoing(values: dict[str, Any]) -> dict[str, Any]:
    return {name: shared.outgoing(value) for name, value in values.items()}


def _incoming(values: dict[str, Any]) -> dict[str, Any]:
    return {name: shared.incoming(value) for name, value in values.items()}


class _Movable:
    """What batches of training and of evaluation do alike. Subclasses are dataclasses with these fields."""

    clips: ClipBatch
    keys: list[str]
    _TENSORS: ClassVar[tuple[str, ...]]
    """Names of the tensors beside the clips."""

    def __len__(self) -> int:
        return len(self.keys)

    def __getstate__(self) -> dict[str, Any]:
        """For the way from a worker, see `shared`; torch would give each tensor a new file in memory."""
        return {"clips": _outgoing(vars(self.clips)), "rest": _outgoing(_without_clips(vars(self)))}

    def __setstate__(self, state: dict[str, dict[str, Any]]) -> None:
        vars(self).update(_incoming(state["rest"]), clips=ClipBatch(**_incoming(state["clips"])))

    def pin_memory(self) -> Self:
        """A copy in page-locked memory."""
        return self._changed(self.clips.pin_memory(), Tensor.pin_memory)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Self:
        """A copy on a device; `clips` keeps its lengths on the CPU."""
        clips = self.clips.to(device, non_blocking=non_blocking)
        return self._changed(clips, lambda t: t.to(device, non_blocking=non_blocking))

    def _changed(self, clips: ClipBatch, change: Callable[[Tensor], Tensor]) -> Self:
        changed: Any = copy.copy(self)
        changed.clips = clips
        for name in self._TENSORS:
            setattr(changed, name, change(getattr(self, name)))
        return changed


@dataclass
class Batch(_Movable):
    """One micro batch of one rank for training.

    Attributes:
        clips: the waveforms, int16.
        input_ids: int64 (b, L), padded with 1 to the longest caption.
        attention_mask: int64 (b, L).
        caption_ids: int64 (b,), equal where captions are equal (a hash of the text), or where the samples' json names
            the same `group`.
        keys: `shard::basename` of each sample that is really in the batch.
        position: where the step that this micro batch belongs to begins.
        micro_index: 0-based number of the micro batch in its step.
        skipped: (key, reason) of each sample that could not be used; other samples of the epoch took their places.
        notes: what was found wrong with shards, each said once by a worker.
        num_truncated: captions that were cut to `max_caption_tokens`.
        set_ids: int64 (b,), always on the CPU: the data set of each sample, its number in `ShardIndex.sets`.
        seconds: time that a worker spent on this batch by stage, see `stopwatch.STAGES`.
    """

    clips: ClipBatch
    input_ids: Tensor
    attention_mask: Tensor
    caption_ids: Tensor
    keys: list[str]
    position: DataPosition
    micro_index: int
    skipped: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    num_truncated: int = 0
    set_ids: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    seconds: dict[str, float] = field(default_factory=dict)

    _TENSORS: ClassVar = ("input_ids", "attention_mask", "caption_ids")


@dataclass
class EvalBatch(_Movable):
    """Clips of one rank for evaluation, with all their captions.

    Ranks yield equally many batches of equal size: what is missing at the end is filled with repeats, marked invalid.

    Attributes:
        clips: the waveforms, int16, cut in a fixed way.
        clip_ids: int64 (b,): place of the clip in the natural order of the index.
        valid: bool (b,): count this clip. False for repeats and for clips that stand in for unusable ones.
        input_ids: int64 (c, L): all captions of the clips, padded with 1.
        attention_mask: int64 (c, L).
        caption_clip_ids: int64 (c,): the clip_id of each caption.
        caption_valid: bool (c,): `valid` of its clip.
        caption_ids: int64 (c,), equal where captions are equal (a hash of the text).
        keys: `shard::basename` of each clip.
        captions: the texts, (c,).
        skipped: (key, reason) of each sample that could not be used.
        notes: what was found wrong with shards.
        num_truncated: captions that were cut to `max_caption_tokens`.
        set_ids: int64 (b,), always on the CPU: the data set of each clip, its number in `ShardIndex.sets`.
        seconds: time that a worker spent on this batch by stage, see `stopwatch.STAGES`.
    """

    clips: ClipBatch
    clip_ids: Tensor
    valid: Tensor
    input_ids: Tensor
    attention_mask: Tensor
    caption_clip_ids: Tensor
    caption_valid: Tensor
    caption_ids: Tensor
    keys: list[str]
    captions: list[str]
    skipped: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    num_truncated: int = 0
    set_ids: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    seconds: dict[str, float] = field(default_factory=dict)

    _TENSORS: ClassVar = (
        "clip_ids",
        "valid",
        "input_ids",
        "attention_mask",
        "caption_clip_ids",
        "caption_valid",
        "caption_ids",
    )
