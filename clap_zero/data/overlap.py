"""Whether data that should be held out are trained on."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from clap_zero.data.index import ShardIndex


def shards_in_both(train: ShardIndex, val: ShardIndex) -> list[str]:
    """Shards, as they are shown, that stand in both settings; by place and name, no shard is read."""
    labels = {place.label for place in train.places} & {place.label for place in val.places}
    held_out = set(_shown(val, labels))
    return [name for name in _shown(train, labels) if name in held_out]


def _shown(index: ShardIndex, labels: set[str]) -> Iterator[str]:
    """The shards of some directories. With a million shards elsewhere it takes no time."""
    numbers = [number for number, place in enumerate(index.places) if place.label in labels]
    for shard in np.flatnonzero(np.isin(index.place_ids, numbers)).tolist():
        yield index.places[index.place_ids[shard]].label + index.names[shard]
