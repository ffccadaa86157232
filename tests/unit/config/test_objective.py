"""The objective's keys: defaults that go together, contradictions in one line, what a run says of its negatives."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from clap_zero.config.deepspeed import Machine, resolve
from clap_zero.config.load import parse_command_line
from clap_zero.config.objective import ObjectiveSection, told_objective
from clap_zero.errors import ConfigError

DS = ["--ds_config", "ds_configs/zero2.json"]
MACHINE = Machine(memory_bytes=0, num_samples=500, device_type="cpu")


def test_defaults_are_exact_negatives_and_soft_positives() -> None:
    section = parse_command_line(DS).run.objective
    assert section == ObjectiveSection(negatives="global", loss="softmax", positives="soft")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--objective.loss", "sigmoid", "--objective.label_smoothing", "0.1"],
            "label_smoothing 0.1 is defined for",
        ),
        (["--objective.loss", "sigmoid", "--objective.hard_negative_beta", "1"], "hard_negative_beta 1 is defined for"),
        (["--objective.hard_negative_beta", "1"], "(the default): add --objective.positives mask or off"),
        (["--objective.loss", "hinge"], "objective.loss"),
        (["--objective.positives", "all"], "objective.positives"),
        (["--objective.label_smoothing", "-0.1"], "objective.label_smoothing"),
        (["--objective.label_smoothing", "nan"], "objective.label_smoothing"),
        (["--objective.hard_negative_beta", "-1"], "objective.hard_negative_beta"),
        (["--objective.hard_negative_beta", "inf"], "objective.hard_negative_beta"),
        (
            ["--objective.hard_negative_beta", "1e4"],
            "hard_negative_beta 10000.0 is refused: it should be less",
        ),
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


def told(*flags: str, world: int = 2, **ds: object) -> list[str]:
    command = parse_command_line([*DS, *flags], has_gpu=False)
    ds = {"train_micro_batch_size_per_gpu": 8, **ds}
    resolved = resolve(ds, command.run, world_size=world, machine=MACHINE, explicit=command.explicit)
    return told_objective(resolved, world_size=world)


@pytest.mark.parametrize(
    ("negatives", "accumulation", "message"),
    [
        (
            "global",
            3,
            "all 48 pairs of a step; its 3 micro batches are embedded twice for that: about 4/3 of the time of "
            "--objective.negatives micro, and 6 MB a rank for log-mels",
        ),
        (
            "micro",
            3,
            "the 16 pairs of a micro batch over all ranks, of the 48 of a step: objective.negatives micro, one pass; "
            "all of them (global) would take about 4/3 of the time",
        ),
        (
            "local",
            3,
            "the 8 pairs of a rank's micro batch, of the 48 of a step: objective.negatives local, one pass that "
            "exchanges no embeddings",
        ),
        ("local", 1, "the 8 pairs of a rank's micro batch, of the 16 of a step"),
        ("global", 1, "all 16 pairs of a step, in one pass"),
        ("micro", 1, "all 16 pairs of a step, in one pass"),
    ],
)
def test_the_negatives_in_force_are_told(negatives: str, accumulation: int, message: str) -> None:
    flags = ("--model.preset", "tiny", "--objective.negatives", negatives, "--objective.label_smoothing", "0.1")
    first, second = told(*flags, gradient_accumulation_steps=accumulation)
    assert first.startswith(f"negatives: {message}")
    assert second.startswith("objective: softmax") and "positives soft; label smoothing 0.1" in second


def test_one_rank_without_accumulation_has_all_its_negatives_anyway() -> None:
    first, _ = told("--model.preset", "tiny", "--objective.negatives", "local", world=1)
    assert first == "negatives: all 8 pairs of a step, in one pass"


@pytest.mark.parametrize("negatives", ["global", "micro"])
def test_the_price_follows_the_settings(negatives: str) -> None:
    """A recomputing backward makes the second forward a smaller part of the whole; fusion holds four log-mels."""
    zero = {"zero_optimization": {"stage": 3}, "activation_checkpointing": {}, "gradient_accumulation_steps": 3}
    first, _ = told("--model.preset", "htsat-fused", "--objective.negatives", negatives, **zero)
    assert "about 5/4 of the time" in first
    if negatives == "global":
        assert "25 MB a rank for log-mels; ZeRO stage 3 gathers the weights for each embedding" in first


@pytest.mark.parametrize(
    ("negatives", "micro", "accumulation", "world", "message"),
    [
        ("global", 1, 1, 1, "the global batch is one pair, which has nothing to be compared with"),
        ("micro", 1, 4, 1, "a micro batch over all ranks, and that is one pair"),
        ("local", 1, 4, 1, "one rank's micro batch, and that is one pair"),
        ("local", 1, 4, 2, "--objective.negatives micro or global"),
        ("global", 1, 2, 1, ""),
        ("global", 1, 1, 2, ""),
        ("micro", 1, 4, 2, ""),
        ("local", 2, 1, 1, ""),
    ],
)
def test_a_pair_needs_another_among_its_negatives(
    negatives: str, micro: int, accumulation: int, world: int, message: str
) -> None:
    def told_of_it() -> list[str]:
        flag = ("--objective.negatives", negatives)
        ds = {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": accumulation}
        return told(*flag, world=world, **ds)

    if message:
        with pytest.raises(ConfigError, match=re.escape(message)):
            told_of_it()
    else:
        assert told_of_it()


@pytest.mark.parametrize("form", ["flag", "file"])
@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("objective.mlp", "off", ""),
        ("objective.mlp", "false", ""),
        ("objective.positives", "false", ""),
        ("objective.positives", "on", "'off', 'mask' or 'soft' is possible"),
        ("objective.positives", "true", "objective.positives true is refused: 'off', 'mask' or 'soft' is possible"),
        ("wandb.mode", "false", "wandb.mode"),
        ("wandb.mode", "off", "'auto', 'online', 'offline' or 'disabled' is possible"),
        ("objective.label_smoothing", "true", "objective.label_smoothing true is refused: a number is needed"),
        (
            "train.global_batch_size",
            "false",
            "false is refused: a whole number is needed or auto",
        ),
        ("train.epochs", "true", "train.epochs true is refused: a number is needed"),
    ],
)
def test_a_truth_value_is_off_where_there_is_off_and_else_refused_by_its_key(
    tmp_path: Path, form: str, key: str, value: str, message: str
) -> None:
    section, _, leaf = key.partition(".")
    file = tmp_path / "run.yaml"
    file.write_text(f"{section}:\n  {leaf}: {value}\n")
    argv = [*DS, "--config", str(file)] if form == "file" else [*DS, f"--{key}", value]
    if not message:
        assert getattr(parse_command_line(argv).run.objective, leaf) == "off"
        return
    with pytest.raises(ConfigError) as caught:
        parse_command_line(argv)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert f"{file}:2: " in str(caught.value) or form == "flag"
