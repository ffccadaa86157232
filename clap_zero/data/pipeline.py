"""The WebDataset pipeline of a loader worker: one list of stages from shard members to batches.

What takes the place of a sample that cannot be used: slots.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import webdataset as wds

from clap_zero.audio.clips import ClipBatch, plan_crop
from clap_zero.audio.logmel import decode_logmel, is_logmel
from clap_zero.audio.pcm import load_pcm
from clap_zero.audio.waveform import crop
from clap_zero.data.batch import Batch, EvalBatch, LoaderPlan
from clap_zero.data.blacklist import Blacklist
from clap_zero.data.captions import all_captions, caption_id, draw_caption, pair_id
from clap_zero.data.index import ShardIndex
from clap_zero.data.partition import sample_generator
from clap_zero.data.slots import Sample, SlotSource, UnlessBad
from clap_zero.data.stopwatch import Stopwatch
from clap_zero.data.text import Tokenizer, pad_ids
from clap_zero.errors import DataError

_CROP, _CAPTION = 0, 1


@dataclass(frozen=True)
class Failure:
    """Travels instead of a batch when the data cannot be used: the message of a DataError."""

    message: str


def build_pipeline(
    index: ShardIndex, plan: LoaderPlan, *, training: bool, blacklist: Blacklist | None = None
) -> wds.DataPipeline:
    """The stages of a worker, in order. The worker's number and their count are read when it starts to iterate."""
    source = SlotSource(index, plan, training=training, blacklist=Blacklist() if blacklist is None else blacklist)
    watch, buffers = source.watch, list[np.ndarray]()
    return wds.DataPipeline(
        [
            source,  # one dict a slot: __key__, __url__, audio bytes, text bytes, rule, position
            wds.map(
                UnlessBad(DecodeClip(plan, training=training, watch=watch, buffers=buffers))
            ),  # audio bytes -> part of the clip
            wds.map(UnlessBad(ChooseCaptions(plan, training=training, watch=watch))),  # text bytes -> captions
            wds.map(UnlessBad(Tokenise(plan, watch=watch))),  # captions -> token ids
            Assemble(
                source, plan, training=training, buffers=buffers
            ),  # samples -> Batch or EvalBatch; bad ones go back to the source
            deliver_errors,
        ]
    )


def _generator(sample: Sample, plan: LoaderPlan, purpose: int) -> np.random.Generator:
    return sample_generator(
        plan.seed,
        epoch=sample["work"].position.epoch,
        position=sample["position"],
        attempt=sample["attempt"],
        purpose=purpose,
    )


class DecodeClip:
    """audio bytes -> `clip` int16 (n,), or (m, num_mels) of a stored log-mel; `chunk_starts`, `notes`.

    Training draws the part; evaluation takes a fixed one. For rand_trunc in training only the part is decoded that is
    used; its start is drawn from the whole file.
    """

    def __init__(
        self,
        plan: LoaderPlan,
        *,
        training: bool,
        watch: Stopwatch | None = None,
        buffers: list[np.ndarray] | None = None,
    ) -> None:
        self._buffers = buffers
        self._features, self._plan, self._training = plan.features, plan, training
        self._watch = Stopwatch() if watch is None else watch
        self._max_seconds = plan.max_seconds
        if training and self._features.truncation == "rand_trunc":
            self._max_seconds = min(self._max_seconds, self._features.max_samples / self._features.sample_rate_hz)

    def __call__(self, sample: Sample) -> None:
        rng = _generator(sample, self._plan, _CROP) if self._training else None
        notes: list[str] = []
        data: bytes = sample.pop("audio")
        if is_logmel(data):
            with self._watch.measure("decode"):
                stored = decode_logmel(data, self._features)
                sample["clip"], sample["chunk_starts"] = stored.part(self._features, rng, max_seconds=self._max_seconds)
        else:
            samples = load_pcm(
                data,
                max_seconds=self._max_seconds,
                sample_rate_hz=self._features.sample_rate_hz,
                rng=rng,
                notes=notes,
                seconds=self._watch.seconds,
                buffer=self._buffer(sample),
            )
            part = plan_crop(samples.size, self._features, rng)
            sample["clip"] = crop(samples, part.start_sample, part.num_samples)
            sample["chunk_starts"] = part.chunk_starts
        sample["notes"] = [f"{sample['__key__']}: {note}" for note in notes]

    def _buffer(self, sample: Sample) -> np.ndarray | None:
        """Memory for a full clip that stays the sample's until its batch is made.

        Fresh memory would be taken from the system and given back for each batch: that is a tenth of decoding.
        """
        if self._buffers is None:
            return None
        buffer = self._buffers.pop() if self._buffers else np.empty(self._features.max_samples, dtype=np.int16)
        sample["buffer"] = buffer
        return buffer


class ChooseCaptions:
    """text bytes -> `captions` by the rule of the sample's data set: one drawn in training, all in evaluation."""

    def __init__(self, plan: LoaderPlan, *, training: bool, watch: Stopwatch | None = None) -> None:
        self._plan, self._training = plan, training
        self._watch = Stopwatch() if watch is None else watch

    def __call__(self, sample: Sample) -> None:
        with self._watch.measure("captions"):
            texts, rule = sample.pop("texts"), sample["rule"]
            if self._training:
                captions = [draw_caption(texts, rule, lambda: _generator(sample, self._plan, _CAPTION))]
                sample["caption_ids"] = [pair_id(texts, captions[0])]
            else:
                notes: list[str] = []
                captions = all_captions(texts, rule, notes=notes)
                sample["notes"] = [*sample.get("notes", ()), *(f"{sample['__key__']}: {note}" for note in notes)]
                sample["caption_ids"] = [caption_id(caption.bare) for caption in captions]
            sample["captions"] = [caption.text for caption in captions]


class Tokenise:
    """`captions` -> `ids`, a list of token ids for each, and `num_truncated`."""

    def __init__(self, plan: LoaderPlan, *, watch: Stopwatch | None = None) -> None:
        self._plan = plan
        self._watch = Stopwatch() if watch is None else watch
        self._tokenizer: Tokenizer | None = None

    def __call__(self, sample: Sample) -> None:
        if self._tokenizer is None:  # made in the worker: it is larger than all the rest that is sent there
            self._tokenizer = Tokenizer(self._plan.tokenizer_path)
        with self._watch.measure("tokenise"):
            before = self._tokenizer.num_truncated
            limit = self._plan.max_caption_tokens
            sample["ids"] = [self._tokenizer.encode(text, limit) for text in sample["captions"]]
            sample["num_truncated"] = self._tokenizer.num_truncated - before


class Assemble:
    """Samples -> batches of the plan's size; bad samples go back to the source to be replaced."""

    def __init__(self, source: SlotSource, plan: LoaderPlan, *, training: bool, buffers: list[np.ndarray]) -> None:
        self._source, self._plan, self._buffers = source, plan, buffers
        self._make = _train_batch if training else _eval_batch

    def __call__(self, samples: Iterator[Sample]) -> Iterator[Batch | EvalBatch | Failure]:
        done: list[Sample] = []
        skipped: list[tuple[str, str]] = []
        for sample in samples:
            if "fault" in sample:
                # Only where the sample stands itself: so each bad sample counts once, however often it is drawn again.
                if sample["attempt"] == 0 and sample["valid"]:
                    skipped.append((sample["__key__"], sample["fault"]))
                self._source.retry(sample)
                self._take_back([sample])
                continue
            done.append(sample)
            if len(done) == self._plan.micro_batch:
                with self._source.watch.measure("collate"):
                    batch = self._make(done)
                    batch.skipped, batch.notes = skipped, self._source.reader.take_notes()
                    batch.notes += [note for sample in done for note in sample["notes"]]
                    batch.num_truncated = sum(sample["num_truncated"] for sample in done)
                    batch.set_ids = torch.tensor([sample["set_id"] for sample in done])
                    self._take_back(done)
                    done, skipped = [], []
                batch.seconds = self._source.watch.take()
                yield batch

    def _take_back(self, samples: list[Sample]) -> None:
        self._buffers += [sample["buffer"] for sample in samples if "buffer" in sample]


def _clips(samples: list[Sample]) -> ClipBatch:
    return ClipBatch.from_parts([sample["clip"] for sample in samples], [sample["chunk_starts"] for sample in samples])


def _caption_ids(samples: list[Sample]) -> torch.Tensor:
    return torch.tensor([number for sample in samples for number in sample["caption_ids"]], dtype=torch.int64)


def _train_batch(samples: list[Sample]) -> Batch:
    input_ids, attention_mask = pad_ids([sample["ids"][0] for sample in samples])
    return Batch(
        clips=_clips(samples),
        input_ids=input_ids,
        attention_mask=attention_mask,
        caption_ids=_caption_ids(samples),
        keys=[sample["__key__"] for sample in samples],
        position=samples[0]["work"].position,
        micro_index=samples[0]["work"].micro_index,
    )


def _eval_batch(samples: list[Sample]) -> EvalBatch:
    valid = [sample["valid"] and sample["attempt"] == 0 for sample in samples]
    input_ids, attention_mask = pad_ids([ids for sample in samples for ids in sample["ids"]])
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
        caption_ids=_caption_ids(samples),
        keys=[sample["__key__"] for sample in samples],
        captions=[caption for sample in samples for caption in sample["captions"]],
    )


def deliver_errors(batches: Iterator[Batch | EvalBatch]) -> Iterator[Batch | EvalBatch | Failure]:
    """Sends a DataError to the rank as what it is; torch would wrap it in the traceback of another process."""
    try:
        yield from batches
    except DataError as error:
        yield Failure(str(error))
