"""The objective's keys: defaults that go together, contradictions in one line, what a run says of its negatives."""

from __future__ import annotations

import pytest

from clap_zero.config.load import parse_command_line
from clap_zero.config.objective import ObjectiveSection, told_objective
from clap_zero.errors import ConfigError
from clap_zero.objective.config import ObjectiveConfig

DS = ["--ds_config", "ds_configs/zero2.json"]


def test_defaults_are_exact_negatives_and_soft_positives() -> None:
    section = parse_command_line(DS).run.objective
    assert section == ObjectiveSection(negatives="global", loss="softmax", positives="soft")
    # What the section takes the objective takes, too.
    assert ObjectiveConfig(**section.model_dump(exclude={"negatives", "mlp"})).positives == "soft"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--objective.loss", "sigmoid", "--objective.label_smoothing", "0.1"],
            "label_smoothing 0.1 is defined for",
        ),
        (["--objective.loss", "sigmoid", "--objective.hard_negative_beta", "1"], "hard_negative_beta 1 is defined for"),
        (["--objective.hard_negative_beta", "1"], "hard_negative_beta 1 has no definition for several positives"),
        (["--objective.negatives", "all"], "'global', 'micro' or 'local' is possible"),
        (["--objective.label_smoothing", "1"], "objective.label_smoothing"),
        (
            ["--objective.hard-negative-beta=1", "--objective.label-smoothing=0.1", "--objective.positives=mask"],
            "hard_negative_beta 1 weights negatives that objective.label_smoothing 0.1 makes targets",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_command_line([*DS, *flags])
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("negatives", "accumulation", "message"),
    [
        ("global", 1, "all 16 pairs of a step, in one pass"),
        ("global", 3, "all 48 pairs of a step; its 3 micro batches are embedded twice for that, 4/3 of the time"),
        ("micro", 1, "all 16 pairs of a step, in one pass"),
        ("micro", 3, "the 16 pairs of a micro batch over all ranks, of the 48 of a step"),
        ("local", 3, "the 8 pairs of a rank's micro batch, of the 48 of a step"),
    ],
)
def test_the_negatives_in_force_are_told(negatives: str, accumulation: int, message: str) -> None:
    section = ObjectiveSection(negatives=negatives, label_smoothing=0.1)
    first, second = told_objective(section, micro_batch=8, accumulation=accumulation, world_size=2)
    assert message in first
    assert second.startswith("objective: softmax") and "positives soft; label smoothing 0.1" in second
