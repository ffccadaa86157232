"""The objective's config is that of the run: one source of defaults, ranges and contradictions."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from clap_zero.config.objective import ObjectiveSection
from clap_zero.objective.config import ObjectiveConfig


def test_defaults_are_those_of_a_run() -> None:
    assert ObjectiveConfig() == ObjectiveConfig.of(ObjectiveSection())
    assert ObjectiveConfig().uses_groups and not ObjectiveConfig().uses_bias


@pytest.mark.parametrize(
    "keys",
    [
        {"loss": "sigmoid", "positives": "mask"},
        {"loss": "softmax", "positives": "off", "label_smoothing": 0.25},
        {"loss": "softmax", "positives": "mask", "hard_negative_beta": 0.5},
    ],
)
def test_every_key_of_a_run_arrives(keys: dict[str, Any]) -> None:
    config = ObjectiveConfig.of(ObjectiveSection(**keys))
    assert {name: value for name, value in asdict(config).items() if name in keys} == keys
    # These two say where the candidates and the model come from; all others are of the loss.
    assert set(asdict(config)) == set(ObjectiveSection.model_fields) - {"negatives", "mlp"}


def test_what_needs_groups_and_a_bias() -> None:
    assert not ObjectiveConfig(positives="off").uses_groups
    assert ObjectiveConfig(positives="mask").uses_groups
    assert ObjectiveConfig(loss="sigmoid").uses_bias


def test_contradictions_are_no_config() -> None:
    with pytest.raises(AssertionError, match="defined for the softmax loss only"):
        ObjectiveConfig(loss="sigmoid", label_smoothing=0.1)
