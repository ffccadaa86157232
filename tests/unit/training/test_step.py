"""The micro batches of a step, and what is noted of them on the way."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from clap_zero.audio.clips import ClipBatch
from clap_zero.audio.features import FeatureConfig
from clap_zero.data.batch import Batch
from clap_zero.data.partition import DataPosition
from clap_zero.training.step import _Drawn


def endless() -> Iterator[Batch]:
    clips = ClipBatch.from_clips([], FeatureConfig("rand_trunc"), rng=None, as_int16=True)
    number = 0
    while True:
        ids = torch.ones(2, 3, dtype=torch.int64)
        yield Batch(
            clips=clips,
            input_ids=ids,
            attention_mask=ids,
            caption_ids=torch.tensor([number, number]),
            keys=[f"{number}a", f"{number}b"],
            position=DataPosition(epoch=number // 4, offset=0),
            micro_index=number % 3,
            skipped=[(f"{number}x", "no sound")] if number == 1 else [],
            set_ids=torch.tensor([0, 1]),
        )
        number += 1


def test_a_step_draws_its_micro_batches_and_no_more() -> None:
    batches = endless()
    drawn = _Drawn(batches, 3)
    assert [batch.keys[0] for batch in drawn] == ["0a", "1a", "2a"]
    assert drawn.keys == ["0a", "0b", "1a", "1b", "2a", "2b"]
    assert drawn.skipped == [("1x", "no sound")]
    assert drawn.tally.sets == {0: 3, 1: 3} and drawn.tally.equal_captions == 3
    assert drawn.epoch == 0 and drawn.wait_s > 0
    assert list(drawn) == [], "a step is drawn once"
    later = _Drawn(batches, 3)
    assert [batch.keys[0] for batch in later] == ["3a", "4a", "5a"] and later.epoch == 1
