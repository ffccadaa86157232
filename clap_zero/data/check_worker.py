"""A process of `clap-zero check`: reads each sample of a shard as training would, and says what it found."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from clap_zero.audio.logmel import is_logmel, stored_truncation
from clap_zero.data.batch import LoaderPlan
from clap_zero.data.blacklist import Blacklist
from clap_zero.data.captions import CaptionRule
from clap_zero.data.members import BadSampleError, ShardContents
from clap_zero.data.pipeline import ChooseCaptions, DecodeClip, Tokenise
from clap_zero.data.places import is_remote, local_path
from clap_zero.data.processes import init_worker
from clap_zero.data.shards import Shard, ShardReader
from clap_zero.data.slots import Sample, UnlessBad
from clap_zero.data.spans import contents_rows
from clap_zero.errors import DataError

OPENING = -1
"""The place of a process that reads the headers of its shard."""
_TELL_EVERY_S = 0.1
_PREFETCH = 8
"""Samples of a remote shard that are asked for ahead."""


class Place(Protocol):
    """A number in shared memory."""

    value: int


@dataclass(frozen=True)
class Task:
    """A shard to read.

    Attributes:
        number: its number in the index.
        shard: the shard.
        rule: how captions are made.
        first: sample to begin with.
        lost: samples that ended an earlier process, and how; they are not read again.
        any_kind: take a stored log-mel for the kind of model that it was made for.
        recount: read the pairs that are there instead of those of the count of record.
    """

    number: int
    shard: Shard
    rule: CaptionRule
    first: int = 0
    lost: Mapping[int, str] = field(default_factory=dict)
    any_kind: bool = False
    recount: bool = False


@dataclass(frozen=True)
class Ready:
    """The process has started and takes tasks."""


@dataclass(frozen=True)
class Opened:
    """The headers of a shard were read.

    Attributes:
        num_pairs: complete pairs.
        size_bytes: size of the tar; 0 where it is remote.
        spans: byte ranges of the pairs, rows of spans.npy.
    """

    num_pairs: int
    size_bytes: int
    spans: np.ndarray


@dataclass(frozen=True)
class Reached:
    """All that there is to say about the samples before this one was said."""

    sample_id: int


@dataclass(frozen=True)
class Good:
    """A sample that training can use.

    Attributes:
        duration_s: seconds of sound that were decoded.
        num_truncated: captions that are longer than the model takes.
        logmel: the kind of model that a stored log-mel is for; None for audio.
    """

    duration_s: float
    num_truncated: int
    logmel: str | None = None


@dataclass(frozen=True)
class Bad:
    """A sample that training has to skip.

    Attributes:
        key: `shard::basename`.
        reason: why.
        fatal: training does not skip it, it ends.
    """

    key: str
    reason: str
    fatal: bool = False


@dataclass(frozen=True)
class Note:
    """Something wrong that loses no sample of the count of record; begins with the path or the key."""

    text: str


@dataclass(frozen=True)
class Done:
    """The shard is read to its end. A `fault` ended it early, and ends training."""

    fault: str | None = None
    num_left: int = 0


@dataclass(frozen=True)
class Unpaired:
    """A key behind the count of record that lacks its audio or its caption: training never reads it."""

    key: str
    reason: str


@dataclass(frozen=True)
class Blacklisted:
    """A sample that training leaves out because the user asked for it.

    Attributes:
        names: hashes of the names in the blacklist that it goes by.
    """

    names: frozenset[int]


Message = Ready | Opened | Reached | Good | Bad | Blacklisted | Note | Unpaired | Done


def run_worker(
    connection: Connection, place: Place, *, parent_pid: int, plan: LoaderPlan, blacklist: Blacklist
) -> None:
    """Takes tasks until None comes, and answers each with lists of messages, the last of which ends with Done.

    Args:
        connection: to the parent.
        place: shared with the parent, holds the sample that is being read: if the process dies, it was this one.
        parent_pid: the process to leave with.
        plan: how samples are read.
        blacklist: samples to leave out.
    """
    init_worker(parent_pid)
    checker = _Checker(plan, blacklist)
    # The parent may be gone at any time, and with it all that there is to do.
    with contextlib.suppress(EOFError, ConnectionError):
        connection.send([Ready()])
        while (task := connection.recv()) is not None:
            place.value = OPENING
            _tell(connection, place, checker.read(task))


def _tell(connection: Connection, place: Place, messages: Iterator[Message]) -> None:
    """Sends messages in lists: one a sample would keep the parent busier than the decoders keep some cores."""
    said: list[Message] = []
    sent_s = time.monotonic()
    for message in messages:
        if not isinstance(message, Reached):
            said.append(message)
            continue
        if time.monotonic() - sent_s >= _TELL_EVERY_S:
            connection.send([*said, message])
            said, sent_s = [], time.monotonic()
        place.value = message.sample_id
    connection.send(said)


class _Checker:
    """Reads shards through the stages of the loader, one sample at a time."""

    def __init__(self, plan: LoaderPlan, blacklist: Blacklist) -> None:
        self._blacklist = blacklist
        self._rate_hz, self._hop = plan.features.sample_rate_hz, plan.features.hop
        self._reader = ShardReader(plan.policy, shards_kept=1)
        # As in evaluation: the whole clip is decoded and all captions are read, not a part drawn by chance.
        kinds: tuple[Literal["fusion", "rand_trunc"], ...] = ("fusion", "rand_trunc")
        self._decode = UnlessBad(DecodeClip(plan, training=False))
        self._decode_kind = {
            kind: UnlessBad(DecodeClip(replace(plan, features=replace(plan.features, truncation=kind)), training=False))
            for kind in kinds
        }
        self._stages = (
            UnlessBad(ChooseCaptions(plan, training=False)),
            UnlessBad(Tokenise(plan)),
        )

    def read(self, task: Task) -> Iterator[Message]:
        """All that is to be said about a shard."""
        shard, sample_id = task.shard, task.first
        try:
            contents = self._contents(shard)
            if task.recount and contents is not None:
                shard = replace(shard, num_samples=contents.num_complete)
            if task.first == 0 and contents is not None:
                size_bytes = 0 if is_remote(shard.path) else Path(local_path(shard.path)).stat().st_size
                yield Opened(contents.num_complete, size_bytes, contents_rows(contents))
            for sample_id in range(task.first, shard.num_samples):
                yield from self._sample(task, shard, sample_id)
            for note in self._reader.take_notes():
                yield Note(note)
            if contents is not None:
                yield from _unpaired(shard, contents)
        except DataError as error:
            # A source that cannot be had ends training (data.missing_shards: stop); here the next shard follows.
            yield Done(str(error), shard.num_samples - sample_id)
        else:
            yield Done()

    def _contents(self, shard: Shard) -> ShardContents | None:
        try:
            return self._reader.contents(shard)
        except BadSampleError:
            return None  # each of its samples says why

    def _sample(self, task: Task, shard: Shard, sample_id: int) -> Iterator[Message]:
        if is_remote(shard.path):
            for ahead in range(sample_id + 1, min(sample_id + _PREFETCH, shard.num_samples)):
                self._reader.prefetch(shard, ahead)
        yield Reached(sample_id)
        if sample_id in task.lost:
            yield Bad(self._key(shard, sample_id), task.lost[sample_id], fatal=True)
            return
        try:
            raw = self._reader.read(shard, sample_id)
            key = f"{shard.key_prefix}::{raw.key}"
            if names := self._blacklist.matches(key, audio=raw.audio, texts=raw.texts):
                yield Blacklisted(names)
                return
        except BadSampleError as error:
            yield Bad(self._key(shard, sample_id), str(error))
            return
        sample: Sample = {"__key__": key, "__url__": shard.path, "audio": raw.audio, "texts": raw.texts}
        sample["rule"] = task.rule
        kind = stored_truncation(raw.audio) if is_logmel(raw.audio) else None
        decode = self._decode if kind is None or not task.any_kind else self._decode_kind[kind]
        for stage in (decode, *self._stages):
            stage(sample)
        if "fault" in sample:
            yield Bad(key, sample["fault"])
            return
        for note in sample["notes"]:
            yield Note(note)
        yield Good(self._duration_s(sample["clip"]), sample["num_truncated"], kind)

    def _key(self, shard: Shard, sample_id: int) -> str:
        return f"{shard.key_prefix}::{self._reader.key(shard, sample_id)}"

    def _duration_s(self, clip: np.ndarray) -> float:
        """Of samples (n,), or of the frames (m, num_mels) of a stored log-mel."""
        return clip.shape[0] * (1 if clip.ndim == 1 else self._hop) / self._rate_hz


def _unpaired(shard: Shard, contents: ShardContents) -> Iterator[Unpaired]:
    for number in range(max(contents.num_complete, shard.num_samples), len(contents.keys)):
        lacks = "no .json or .txt member" if contents.groups[number].audio is not None else "no audio member"
        yield Unpaired(f"{shard.key_prefix}::{contents.keys[number]}", f"{lacks} with this key")
