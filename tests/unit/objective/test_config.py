"""Which combinations of the objective's parts are refused, and how."""

from __future__ import annotations

from typing import Any

import pytest

from clap_zero.errors import ConfigError
from clap_zero.objective.config import ObjectiveConfig


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": "hinge"}, "objective.loss hinge: must be one of softmax, sigmoid"),
        ({"positives": "all"}, "objective.positives all: must be one of off, mask, soft"),
        ({"label_smoothing": 1.0}, "objective.label_smoothing 1: must be at least 0 and below 1"),
        ({"label_smoothing": -0.1}, "objective.label_smoothing -0.1"),
        ({"label_smoothing": float("nan")}, "objective.label_smoothing nan"),
        ({"hard_negative_beta": -1.0}, "objective.hard_negative_beta -1: must be 0 \\(off\\) or positive"),
        ({"hard_negative_beta": float("inf")}, "objective.hard_negative_beta inf"),
        ({"loss": "sigmoid", "label_smoothing": 0.1}, "label_smoothing 0.1 is defined for the softmax loss only"),
        ({"loss": "sigmoid", "hard_negative_beta": 1.0}, "hard_negative_beta 1 is defined for the softmax loss only"),
        ({"label_smoothing": 0.1, "hard_negative_beta": 1.0}, "set one of them to 0"),
        ({"positives": "soft", "hard_negative_beta": 1.0}, "no definition for several positives"),
    ],
)
def test_refused_in_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        ObjectiveConfig(**settings)
    assert "\n" not in str(caught.value)


def test_what_needs_groups_and_a_bias() -> None:
    assert not ObjectiveConfig().uses_groups
    assert not ObjectiveConfig().uses_bias
    assert ObjectiveConfig(positives="mask").uses_groups
    assert ObjectiveConfig(loss="sigmoid").uses_bias
