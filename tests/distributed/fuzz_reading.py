"""A rank that reads fuzzed shards with worker processes, and says whose sound and caption came with which key."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

from clap_zero.data.batch import Batch, LoaderPlan
from clap_zero.data.captions import caption_id
from clap_zero.data.index import load_index
from clap_zero.data.loader import train_batches
from clap_zero.distributed.collectives import all_gather_objects, rank_and_size
from tests.distributed.fuzz_shards import CONFIG, Owner, owners, windows
from tests.processes import command_of

MICRO_BATCH = 4


@dataclass
class Account:
    """What a rank read.

    Attributes:
        wrong: what must not be: a sound or a caption that is not that of its key.
        epochs: (keys of batches, keys of skipped samples) of all ranks, by epoch.
        exact: keys whose sound and caption were those of an undamaged sample, to the bit.
        reasons: why samples were skipped.
        memory: resident bytes of each worker at the end of each epoch.
        peak_bytes: largest resident size of a worker at any time.
    """

    wrong: list[str] = field(default_factory=list)
    epochs: list[tuple[list[str], list[str]]] = field(default_factory=list)
    exact: set[str] = field(default_factory=set)
    reasons: Counter[str] = field(default_factory=Counter)
    memory: list[list[int]] = field(default_factory=list)
    peak_bytes: int = 0


def workers() -> list[psutil.Process]:
    """The loader's processes of this rank: the children of its fork server, oldest first."""
    servers = [child for child in psutil.Process().children() if "forkserver" in command_of(child)]
    return sorted((worker for server in servers for worker in server.children()), key=lambda worker: worker.pid)


def peak_of(worker: psutil.Process) -> int:
    """Largest resident size of a process so far, in bytes."""
    lines = Path(f"/proc/{worker.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


class Judge:
    """Knows whose every sound and every caption is."""

    def __init__(self, num_shards: int) -> None:
        self._sounds: dict[int, Owner] = {}
        self._captions: dict[int, Owner] = {}
        for owner in (owner for shard in range(num_shards) for owner in owners(shard)):
            self._captions[caption_id(owner.caption)] = owner
            self._sounds.update(dict.fromkeys(windows(owner.heard()), owner))

    def look(self, batch: Batch, account: Account) -> None:
        """Judges all samples of a batch."""
        for key, heard, caption in zip(batch.keys, clips_of(batch), batch.caption_ids.tolist(), strict=True):
            found = Counter(self._sounds[w] for w in windows(heard) if w in self._sounds)
            # Damage inside an uncompressed file can carry a scrap of its neighbour in: most of it says whose it is.
            sound = found.most_common(1)[0][0] if found else None
            text = self._captions.get(caption)
            account.wrong += wrongs(key, sound, text)
            if text is not None and np.array_equal(heard, text.heard()):
                account.exact.add(key)


def wrongs(key: str, sound: Owner | None, text: Owner | None) -> list[str]:
    """What must not be about a sample; nobody's sound or caption is damage that no reader can see."""
    place, _, name = key.partition("::")
    shard = int(place.removesuffix(".tar").rsplit("/", 1)[-1])
    found = []
    if sound is not None and text is not None and sound != text:
        found.append(f"{key}: the sound of {sound} with the caption of {text}")
    for owner in {owner for owner in (sound, text) if owner is not None}:
        # An earlier tar may stand behind a torn one, in the same file.
        if owner.key != name.rsplit("/", 1)[-1] or owner.shard > shard:
            found.append(f"{key}: holds {owner}")
    return found


def clips_of(batch: Batch) -> list[np.ndarray]:
    """Waveforms (n,) and stored log-mels (m, num_mels) of a batch, in order."""
    clips, at, row = [], 0, 0
    is_mel = [False] * len(batch) if batch.clips.is_mel is None else batch.clips.is_mel.tolist()
    for mel, length in zip(is_mel, batch.clips.lengths.tolist(), strict=True):
        if mel:
            assert batch.clips.mels is not None
            clips.append(batch.clips.mels[row : row + length].numpy())
            row += length
        else:
            clips.append(batch.clips.samples[at : at + length].numpy())
            at += length
    return clips


def read_fuzzed(split: str, num_epochs: int, num_workers: int = 2) -> Account:
    """A rank's part of some epochs; a collective in each step, so that unequal steps would hang.

    Collective: all ranks must call.
    """
    rank, size = rank_and_size()
    index = load_index([split])
    judge = Judge(index.num_shards)
    plan = LoaderPlan(
        rank=rank,
        world_size=size,
        micro_batch=MICRO_BATCH,
        features=CONFIG,
        workers=num_workers,
        max_bad_fraction=1.0,
        seed=7,
    )
    steps, remainder = divmod(index.num_samples, plan.global_batch)
    assert remainder == 0, "every sample is to have a slot"
    account = Account()
    batches = train_batches(index, plan=plan)
    for epoch in range(num_epochs):
        keys: list[str] = []
        skipped: list[str] = []
        for _ in range(steps):
            batch = next(batches)
            assert batch.position.epoch == epoch and len(batch) == MICRO_BATCH
            judge.look(batch, account)
            account.reasons.update(reason for _, reason in batch.skipped)
            everywhere = all_gather_objects((batch.keys, [key for key, _ in batch.skipped]))
            keys += [key for mine, _ in everywhere for key in mine]
            skipped += [key for _, theirs in everywhere for key in theirs]
        account.epochs.append((keys, skipped))
        account.memory.append([worker.memory_info().rss for worker in workers()])
        account.peak_bytes = max(peak_of(worker) for worker in workers())
    batches.close()
    return account
