"""The source of a loader worker: which sample stands in each slot, its bytes, and what takes the place of a bad one.

The bad sample rule: a sample that cannot be used (unreadable, no sound, no caption, blacklisted) leaves its slot of the
epoch to the sample at another place of the same epoch, a pure function of (place, attempt). So all ranks keep taking
equal steps, batches keep their sizes, and the data position, which counts slots, stays exact. The sample that fills in
is seen once more in that epoch. Each bad sample is reported in `skipped` with its key and reason. In evaluation the
clip that fills in is marked invalid, so nothing is counted twice.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
from torch.utils.data import get_worker_info

from clap_zero.audio.kinds import AudioError
from clap_zero.data.batch import LoaderPlan
from clap_zero.data.blacklist import Blacklist
from clap_zero.data.index import ShardIndex
from clap_zero.data.members import BadSampleError, describe_suffixes
from clap_zero.data.partition import EpochOrder
from clap_zero.data.places import is_remote, shown
from clap_zero.data.prefetch import MAX_PENDING
from clap_zero.data.schedule import Work, eval_schedule, train_schedule
from clap_zero.data.shards import Shard, ShardReader
from clap_zero.data.skips import BLACKLISTED, reason_kind
from clap_zero.data.stopwatch import Stopwatch
from clap_zero.errors import DataError, first_line, one_line

MAX_ATTEMPTS = 64
"""Unusable samples that are tried for one slot before the data is called unusable."""
MAX_LISTED = 4_096
"""Blacklisted samples that are passed over for one slot, too, before the blacklist is called too long."""
_LOST = "the shard cannot be had"
LOOK_AHEAD = MAX_PENDING
"""Slots whose remote samples are asked for before they are read: no more than are kept."""
_ORDERS_KEPT = 2

Sample = dict[str, Any]
"""What travels through the stages of a worker: a slot, then its sample's bytes, then what is made of them."""


class SlotSource:
    """Yields the raw sample of each slot of this worker: it builds batches w, w + W, w + 2 W... of W workers.

    Stages pull one sample at a time, so a slot that `retry` gives back is served before the next one.
    """

    def __init__(self, index: ShardIndex, plan: LoaderPlan, *, training: bool, blacklist: Blacklist) -> None:
        self._index, self._plan, self._training = index, plan, training
        self._blacklist = blacklist
        self._orders: OrderedDict[int, EpochOrder] = OrderedDict()
        self._again: deque[Sample] = deque()
        self.watch = Stopwatch()
        self.reader = ShardReader(plan.policy, shards_kept=2 * plan.shuffle_shards + 8)

    def __call__(self) -> Iterator[Sample]:
        info = get_worker_info()
        worker, num_workers = (info.id, info.num_workers) if info is not None else (0, 1)
        schedule = train_schedule if self._training else eval_schedule
        works = islice(schedule(self._plan, self._index.num_epoch(training=self._training)), worker, None, num_workers)
        try:
            for slot in self._ahead(works):
                yield self._read(slot)
                while self._again:
                    yield self._read(self._located(self._again.popleft()))
        finally:
            self.reader.close()

    def retry(self, sample: Sample) -> None:
        """Asks for another sample in the place of a bad one.

        Raises:
            DataError: too many samples in a row were bad for this slot.
        """
        attempt, faults = sample["attempt"] + 1, sample["faults"]
        if sample["fault"] != BLACKLISTED:
            faults = (*faults, sample["fault"])
        if len(faults) >= MAX_ATTEMPTS or attempt - len(faults) >= MAX_LISTED:
            raise DataError(one_line(self._nothing_usable(attempt, faults, sample["__key__"])))
        kept = {name: sample[name] for name in ("work", "slot", "position", "valid")}
        self._again.append({**kept, "attempt": attempt, "faults": faults})

    def _nothing_usable(self, attempt: int, faults: Sequence[str], key: str) -> str:
        """Why no sample was found for a slot.

        Args:
            attempt: samples that were tried.
            faults: reasons of the unusable ones; the others are blacklisted.
            key: of the last of them.
        """
        named, files = attempt - len(faults), ", ".join(self._plan.blacklist) or "the blacklist"
        if named >= MAX_LISTED:
            return (
                f"data.blacklist names {named} of {attempt} samples tried in a row, the last is {key}: is {files} the "
                "list of all samples instead of those to leave out? Take the file out of data.blacklist, or shorten it"
            )
        by_kind: dict[str, list[str]] = {}
        for fault in faults:
            by_kind.setdefault(reason_kind(fault), []).append(fault)
        common = sorted(by_kind.values(), key=len, reverse=True)[:3]
        parts = [
            f"0 usable of {attempt} samples tried in a row, the last is {key}: "
            + "; ".join(f"{some[-1]} ({len(some)})" for some in common)
        ]
        if named:
            parts.append(f"{named} more are named by data.blacklist ({files})")
        if all(fault.startswith(_LOST) for fault in faults):
            parts.append("is their source down? data.missing_shards skip passes over some shards, not over all")
        suffixes = self.reader.suffixes()
        if suffixes:  # none are known of samples that were read by their byte ranges
            parts.append(f"suffixes seen: {describe_suffixes(suffixes)}")
        return "; ".join(parts)

    def _ahead(self, works: Iterator[Work]) -> Iterator[Sample]:
        """The slots of all batches in order; the next LOOK_AHEAD are asked for already, whatever a batch has."""
        asked: deque[Sample] = deque()
        for slot in self._slots(works):
            if is_remote(slot["shard"].path):
                self.reader.prefetch(slot["shard"], slot["sample_id"])
            asked.append(slot)
            if len(asked) >= LOOK_AHEAD:
                yield asked.popleft()
        yield from asked

    def _slots(self, works: Iterator[Work]) -> Iterator[Sample]:
        for work in works:
            shard_ids, sample_ids = self._order(work.position.epoch).locate(work.positions)
            places = zip(
                work.positions.tolist(), work.valid.tolist(), shard_ids.tolist(), sample_ids.tolist(), strict=True
            )
            for number, (position, valid, shard_id, sample_id) in enumerate(places):
                slot = {"work": work, "slot": number, "position": position, "valid": valid, "attempt": 0, "faults": ()}
                yield self._placed(slot, shard_id, sample_id)

    def _located(self, slot: Sample) -> Sample:
        """A slot that is tried again, at the place of another sample."""
        order = self._order(slot["work"].position.epoch)
        place = order.replacement(slot["position"], slot["attempt"])
        shard_ids, sample_ids = order.locate(np.array([place]))
        return self._placed(slot, int(shard_ids[0]), int(sample_ids[0]))

    def _placed(self, slot: Sample, shard_id: int, sample_id: int) -> Sample:
        slot.update(shard=self._index.shard(shard_id), sample_id=sample_id)
        return slot

    def _read(self, sample: Sample) -> Sample:
        shard: Shard = sample["shard"]
        sample_id: int = sample["sample_id"]
        data_set = self._index.sets[shard.set_id]
        sample.update(__url__=shown(shard.path), set_id=shard.set_id, rule=data_set.rule)
        waited_s = self.reader.seconds.get("download", 0.0)
        with self.watch.measure("read"):
            try:
                raw = self.reader.read(shard, sample_id)
                sample.update(audio=raw.audio, texts=raw.texts)
            except BadSampleError as error:
                sample["fault"] = str(error)
            except DataError as error:  # the policy is to stop
                raise DataError(one_line(f"{error} (at sample {self._key(shard, sample_id)})")) from error
            except Exception as error:  # whatever it is, it has to say where
                message = one_line(f"{shown(shard.path)}, sample {self._key(shard, sample_id)}")
                raise DataError(f"{message}: {type(error).__name__}: {first_line(error)}") from error
        waited_s = self.reader.seconds.get("download", 0.0) - waited_s
        self.watch.seconds["read"] -= waited_s
        self.watch.seconds["download"] += waited_s
        sample["__key__"] = self._key(shard, sample_id)
        if len(self._blacklist) and "fault" not in sample:
            with self.watch.measure("captions"):
                if self._blacklist.has(sample["__key__"], audio=sample["audio"], texts=sample["texts"]):
                    sample["fault"] = BLACKLISTED
        return sample

    def _key(self, shard: Shard, sample_id: int) -> str:
        return f"{shard.key_prefix}::{self.reader.key(shard, sample_id)}"

    def _order(self, epoch: int) -> EpochOrder:
        if epoch not in self._orders:
            self._orders[epoch] = self._index.order(
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
            except DataError:
                raise
            except AssertionError as error:
                where = one_line(f"{sample['__url__']}, sample {sample['__key__']}")
                raise DataError(f"{where}: {type(self._stage).__name__}: {error!r}") from error
            except Exception as error:  # noqa: BLE001
                # Decoders raise what they like on broken bytes. One sample must not end a run, and a fault of ours
                # that meets every sample does so by data.max_bad_fraction.
                sample["fault"] = f"{type(error).__name__} in {type(self._stage).__name__}: {first_line(error)}"
        return sample
