"""The WebDataset pipeline of a loader worker: one list of stages from shard members to batches.

The bad sample rule: a sample that cannot be used (unreadable, no sound, no caption) leaves its slot of the epoch to the
sample at another place of the same epoch, a pure function of (place, attempt). So all ranks keep taking equal steps,
batches keep their sizes, and the data position, which counts slots, stays exact. The sample that fills in is seen once
more in that epoch. Each bad sample is reported in `skipped` with its key and reason. In evaluation the clip that fills
in is marked invalid, so nothing is counted twice.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
import webdataset as wds
from torch.utils.data import get_worker_info

from clap_zero.audio.clips import ClipBatch, plan_crop
from clap_zero.audio.decode import AudioError
from clap_zero.audio.pcm import load_pcm
from clap_zero.audio.waveform import crop
from clap_zero.data.batch import Batch, EvalBatch, LoaderPlan
from clap_zero.data.captions import CaptionRule, caption_id, read_captions
from clap_zero.data.index import ShardIndex
from clap_zero.data.partition import EpochOrder, sample_generator
from clap_zero.data.schedule import eval_schedule, train_schedule
from clap_zero.data.shards import BadSampleError, ShardReader, describe_suffixes
from clap_zero.data.text import Tokenizer, pad_ids
from clap_zero.errors import DataError

MAX_ATTEMPTS = 64
"""Samples that are tried for one slot before the data is called unusable."""
_ORDERS_KEPT = 2
_CROP, _CAPTION = 0, 1

Sample = dict[str, Any]


@dataclass(frozen=True)
class Failure:
    """Travels instead of a batch when the data cannot be used: the message of a DataError."""

    message: str


def build_pipeline(index: ShardIndex, plan: LoaderPlan, *, training: bool) -> wds.DataPipeline:
    """The stages of a worker, in order. The worker's number and their count are read when it starts to iterate."""
    source = SlotSource(index, plan, training=training)
    return wds.DataPipeline(
        [
            source,  # one dict a slot: __key__, __url__, audio bytes, text bytes, position
            wds.map(UnlessBad(DecodeClip(plan, training=training))),  # audio bytes -> int16 part of the clip
            wds.map(UnlessBad(ChooseCaptions(plan, training=training))),  # text bytes -> captions
            wds.map(UnlessBad(Tokenise(plan))),  # captions -> token ids
            Assemble(source, plan, training=training),  # samples -> Batch or EvalBatch; bad ones go back to the source
            deliver_errors,
        ]
    )


class SlotSource:
    """Yields the raw sample of each slot of this worker: it builds batches w, w + W, w + 2 W... of W workers.

    Stages pull one sample at a time, so a slot that `retry` gives back is served before the next one.
    """

    def __init__(self, index: ShardIndex, plan: LoaderPlan, *, training: bool) -> None:
        self._index, self._plan, self._training = index, plan, training
        self._orders: OrderedDict[int, EpochOrder] = OrderedDict()
        self._again: deque[Sample] = deque()
        self.reader = ShardReader(plan.policy, shards_kept=2 * plan.shuffle_shards + 8)

    def __call__(self) -> Iterator[Sample]:
        info = get_worker_info()
        worker, num_workers = (info.id, info.num_workers) if info is not None else (0, 1)
        schedule = train_schedule if self._training else eval_schedule
        try:
            for work in islice(schedule(self._plan, self._index.num_samples), worker, None, num_workers):
                for slot, (position, valid) in enumerate(
                    zip(work.positions.tolist(), work.valid.tolist(), strict=True)
                ):
                    first = {"work": work, "slot": slot, "position": position, "valid": valid}
                    yield self._read({**first, "attempt": 0, "faults": ()})
                    while self._again:
                        yield self._read(self._again.popleft())
        finally:
            self.reader.close()

    def retry(self, sample: Sample) -> None:
        """Asks for another sample in the place of a bad one.

        Raises:
            DataError: too many samples in a row were bad for this slot.
        """
        attempt = sample["attempt"] + 1
        faults = (*sample["faults"], sample["fault"])
        if attempt >= MAX_ATTEMPTS:
            reasons = "; ".join(f"{reason} ({number})" for reason, number in Counter(faults).most_common(3))
            raise DataError(
                f"0 usable of {attempt} samples tried in a row, the last is {sample['__key__']}: {reasons}; "
                f"suffixes seen: {describe_suffixes(self.reader.suffixes())}"
            )
        kept = {name: sample[name] for name in ("work", "slot", "position", "valid")}
        self._again.append({**kept, "attempt": attempt, "faults": faults})

    def _read(self, slot: Sample) -> Sample:
        order = self._order(slot["work"].position.epoch)
        place = slot["position"] if slot["attempt"] == 0 else order.replacement(slot["position"], slot["attempt"])
        shard_ids, sample_ids = order.locate(np.array([place]))
        shard, sample_id = self._index.shard(int(shard_ids[0])), int(sample_ids[0])
        sample = dict(slot, __url__=shard.path, place=place)
        try:
            raw = self.reader.read(shard, sample_id)
            sample.update(audio=raw.audio, texts=raw.texts)
        except BadSampleError as error:
            sample["fault"] = str(error)
        sample["__key__"] = f"{shard.key_prefix}::{self.reader.key(shard, sample_id)}"
        return sample

    def _order(self, epoch: int) -> EpochOrder:
        if epoch not in self._orders:
            self._orders[epoch] = EpochOrder(
                self._index.sizes,
                seed=self._plan.seed,
                epoch=epoch,
                shuffle_shards=self._plan.shuffle_shards,
                shuffle=self._training,
            )
            while len(self._orders) > _ORDERS_KEPT:
                self._orders.popitem(last=False)
        return self._orders[epoch]


class UnlessBad:
    """A stage that passes bad samples on, and marks a sample as bad instead of raising."""

    def __init__(self, stage: Callable[[Sample], None]) -> None:
        self._stage = stage

    def __call__(self, sample: Sample) -> Sample:
        if "fault" not in sample:
            try:
                self._stage(sample)
            except (BadSampleError, AudioError) as error:
                sample["fault"] = str(error)
        return sample


def _generator(sample: Sample, plan: LoaderPlan, purpose: int) -> np.random.Generator:
    return sample_generator(
        plan.seed,
        epoch=sample["work"].position.epoch,
        position=sample["position"],
        attempt=sample["attempt"],
        purpose=purpose,
    )


class DecodeClip:
    """audio bytes -> `clip` int16 (n,), `chunk_starts`, `notes`. Training draws the part; evaluation takes a fixed one.

    For rand_trunc in training only the part is decoded that is used; its start is drawn from the whole file.
    """

    def __init__(self, plan: LoaderPlan, *, training: bool) -> None:
        self._features, self._plan, self._training = plan.features, plan, training
        self._max_seconds = plan.max_seconds
        if training and self._features.truncation == "rand_trunc":
            self._max_seconds = min(self._max_seconds, self._features.max_samples / self._features.sample_rate_hz)

    def __call__(self, sample: Sample) -> None:
        rng = _generator(sample, self._plan, _CROP) if self._training else None
        notes: list[str] = []
        samples = load_pcm(
            sample.pop("audio"),
            max_seconds=self._max_seconds,
            sample_rate_hz=self._features.sample_rate_hz,
            rng=rng,
            notes=notes,
        )
        part = plan_crop(samples.size, self._features, rng)
        sample["clip"] = crop(samples, part.start_sample, part.num_samples)
        sample["chunk_starts"] = part.chunk_starts
        sample["notes"] = [f"{sample['__key__']}: {note}" for note in notes]


class ChooseCaptions:
    """text bytes -> `captions`: one drawn in training, all in evaluation."""

    def __init__(self, plan: LoaderPlan, *, training: bool) -> None:
        self._plan, self._training = plan, training

    def __call__(self, sample: Sample) -> None:
        captions = read_captions(sample.pop("texts"), CaptionRule().caption_key)
        if self._training:
            chosen = int(_generator(sample, self._plan, _CAPTION).integers(len(captions)))
            captions = [captions[chosen]]
        sample["captions"] = captions


class Tokenise:
    """`captions` -> `ids`, a list of token ids for each, and `num_truncated`."""

    def __init__(self, plan: LoaderPlan) -> None:
        self._plan = plan
        self._tokenizer: Tokenizer | None = None

    def __call__(self, sample: Sample) -> None:
        if self._tokenizer is None:  # made in the worker: it is larger than all the rest that is sent there
            self._tokenizer = Tokenizer(self._plan.tokenizer_path)
        before = self._tokenizer.num_truncated
        sample["ids"] = [self._tokenizer.encode(text, self._plan.max_caption_tokens) for text in sample["captions"]]
        sample["num_truncated"] = self._tokenizer.num_truncated - before


class Assemble:
    """Samples -> batches of the plan's size; bad samples go back to the source to be replaced."""

    def __init__(self, source: SlotSource, plan: LoaderPlan, *, training: bool) -> None:
        self._source, self._plan = source, plan
        self._make = _train_batch if training else _eval_batch

    def __call__(self, samples: Iterator[Sample]) -> Iterator[Batch | EvalBatch]:
        done: list[Sample] = []
        skipped: list[tuple[str, str]] = []
        for sample in samples:
            if "fault" in sample:
                # Only where the sample stands itself: so each bad sample counts once, however often it is drawn again.
                if sample["attempt"] == 0 and sample["valid"]:
                    skipped.append((sample["__key__"], sample["fault"]))
                self._source.retry(sample)
                continue
            done.append(sample)
            if len(done) == self._plan.micro_batch:
                batch = self._make(done)
                batch.skipped, batch.notes = skipped, self._source.reader.take_notes()
                batch.notes += [note for sample in done for note in sample["notes"]]
                batch.num_truncated = sum(sample["num_truncated"] for sample in done)
                yield batch
                done, skipped = [], []


def _clips(samples: list[Sample]) -> ClipBatch:
    return ClipBatch.from_parts([sample["clip"] for sample in samples], [sample["chunk_starts"] for sample in samples])


def _caption_ids(captions: list[str]) -> torch.Tensor:
    return torch.tensor([caption_id(caption) for caption in captions], dtype=torch.int64)


def _train_batch(samples: list[Sample]) -> Batch:
    input_ids, attention_mask = pad_ids([sample["ids"][0] for sample in samples])
    return Batch(
        clips=_clips(samples),
        input_ids=input_ids,
        attention_mask=attention_mask,
        caption_ids=_caption_ids([sample["captions"][0] for sample in samples]),
        keys=[sample["__key__"] for sample in samples],
        position=samples[0]["work"].position,
        micro_index=samples[0]["work"].micro_index,
    )


def _eval_batch(samples: list[Sample]) -> EvalBatch:
    valid = [sample["valid"] and sample["attempt"] == 0 for sample in samples]
    input_ids, attention_mask = pad_ids([ids for sample in samples for ids in sample["ids"]])
    captions = [caption for sample in samples for caption in sample["captions"]]
    repeats = torch.tensor([len(sample["ids"]) for sample in samples])
    clip_ids, valid_tensor = torch.tensor([sample["position"] for sample in samples]), torch.tensor(valid)
    return EvalBatch(
        clips=_clips(samples),
        clip_ids=clip_ids,
        valid=valid_tensor,
        input_ids=input_ids,
        attention_mask=attention_mask,
        caption_clip_ids=clip_ids.repeat_interleave(repeats),
        caption_valid=valid_tensor.repeat_interleave(repeats),
        caption_ids=_caption_ids(captions),
        keys=[sample["__key__"] for sample in samples],
        captions=captions,
    )


def deliver_errors(batches: Iterator[Batch | EvalBatch]) -> Iterator[Batch | EvalBatch | Failure]:
    """Sends a DataError to the rank as what it is; torch would wrap it in the traceback of another process."""
    try:
        yield from batches
    except DataError as error:
        yield Failure(str(error))
