"""Plans and batches for the tests of the loader."""

from __future__ import annotations

import itertools
from dataclasses import replace

from clap_zero.audio.clips import FeatureConfig
from clap_zero.data.loader import LoaderPlan, train_batches

RAND, FUSION = FeatureConfig("rand_trunc"), FeatureConfig("fusion")


def plan(**change) -> LoaderPlan:
    return replace(LoaderPlan(rank=0, world_size=1, micro_batch=4, features=RAND), **change)


def take(index, number, **change):
    batches = train_batches(index, plan=plan(**change))
    found = list(itertools.islice(batches, number))
    batches.close()
    return found


def keys_of(batches) -> list[str]:
    return [key for batch in batches for key in batch.keys]
