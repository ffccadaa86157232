"""The micro batches of a step, what is noted of them on the way, and its figures."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from clap_zero.audio.clips import ClipBatch
from clap_zero.audio.features import FeatureConfig
from clap_zero.data.batch import Batch
from clap_zero.data.partition import DataPosition
from clap_zero.objective.figures import ObjectiveFigures
from clap_zero.training.passes import PassResult
from clap_zero.training.step import _Drawn, _Numbers, mean_objective


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


def test_a_rank_without_negatives_does_not_count_where_it_has_no_figure() -> None:
    some, none = (1.0, 2.0, 0.5, 0.5, 0.25, 0.125), (0.0, 0.0, 1.0, 1.0, 0.75, math.nan)
    mean = mean_objective([some, none])
    assert mean["hardest_negative_similarity"] == 0.125 and mean["positive_similarity"] == 0.5
    assert math.isnan(mean_objective([none, none])["hardest_negative_similarity"])
    assert math.isnan(mean_objective([some, (math.nan, *some[1:])])["loss_audio_to_text"])


@pytest.mark.parametrize(("bias", "second"), [(None, None), (-10.0, None), (None, 5.0), (-10.0, 5.0)])
def test_numbers_find_their_names(bias: float | None, second: float | None) -> None:
    given = [None if value is None else torch.tensor(value) for value in (14.0, bias, second)]
    figures = ObjectiveFigures(*torch.arange(6.0))
    numbers = _Numbers.read(PassResult(torch.tensor(3.0), figures, *given, updated=True))  # type: ignore[arg-type]
    assert numbers.loss == 3
    assert numbers.scalars == {"logit_scale": 14, "logit_bias": bias, "logit_scale_t": second}
    assert numbers.objective == (0, 1, 2, 3, 4, 5)
