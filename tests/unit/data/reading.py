"""Reads shards as a run would, for tests that look at what comes out."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

from clap_zero.audio.clips import FeatureConfig
from clap_zero.data.batch import Batch, LoaderPlan
from clap_zero.data.index import ShardIndex, load_index
from clap_zero.data.loader import train_batches

RAND, FUSION = FeatureConfig("rand_trunc"), FeatureConfig("fusion")


def plan(**change) -> LoaderPlan:
    """One rank that reads single samples, unless said otherwise."""
    return replace(LoaderPlan(rank=0, world_size=1, micro_batch=1, features=RAND), **change)


def take(source: ShardIndex | Path, number: int, **change) -> list[Batch]:
    """The first batches of a training over an index, or over a split directory."""
    index = load_index([str(source)]) if isinstance(source, Path) else source
    batches = train_batches(index, plan=plan(**change))
    found = list(itertools.islice(batches, number))
    batches.close()
    return found


def keys_of(batches: list[Batch]) -> list[str]:
    """Keys without their shard, in order."""
    return [key.split("::")[1] for batch in batches for key in batch.keys]


def skipped_of(batches: list[Batch]) -> dict[str, str]:
    """Reason by key, without its shard, of what was skipped; nothing is reported twice."""
    entries = [(key.split("::")[1], reason) for batch in batches for key, reason in batch.skipped]
    assert len(dict(entries)) == len(entries)
    return dict(entries)


def clip_of(batches: list[Batch], key: str):
    """The waveform of a sample, float32 (n,), full scale 1."""
    for batch in batches:
        for number, name in enumerate(batch.keys):
            if name.endswith(f"::{key}"):
                start = int(batch.clips.lengths[:number].sum())
                return batch.clips.samples[start : start + int(batch.clips.lengths[number])].float().numpy() / 32767
    raise KeyError(key)
