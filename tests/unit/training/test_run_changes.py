"""What may differ between two starts of a run, and what may not."""

from __future__ import annotations

from typing import Any

import pytest

from clap_zero.config.batch import Batch, kept_micro
from clap_zero.config.deepspeed import Machine, resolve
from clap_zero.config.ds_json import load_ds_json
from clap_zero.config.load import parse_command_line
from clap_zero.errors import ConfigError
from clap_zero.training.run_changes import changes

SHIPPED = [f"ds_configs/zero{kind}.json" for kind in ("1", "2", "2_fp16", "2_offload", "3", "3_offload")]


def started(json: str, world: int, *flags: str, before: dict[str, Any] | None = None) -> dict[str, Any]:
    """Run config, DeepSpeed configuration and data of a start on GPUs."""
    command = parse_command_line(["--ds_config", json, "--model.preset", "tiny", "--train.max_steps", "9", *flags])
    machine = Machine(memory_bytes=80 << 30, num_samples=10_000, device_type="cuda")
    ds = load_ds_json(command.ds_path, command.ds_overrides)
    recorded = None if before is None else before["ds"]
    solved = resolve(ds, command.run, world_size=world, machine=machine, recorded=recorded, explicit=command.explicit)
    return {"run": solved.run.model_dump(mode="json"), "ds": solved.config, "data": {}}


@pytest.mark.parametrize("json", SHIPPED)
@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_other_ranks_and_stages_are_no_change_of_a_run(json: str, world: int, stage: int) -> None:
    flags = ("--train.global_batch_size", "96")
    before = started(json, 2, *flags)
    now = started(json, world, *flags, "--ds.zero_optimization.stage", str(stage), before=before)
    assert now["ds"]["train_batch_size"] == 96
    assert changes(before, now, world_size=world) == []


def test_a_batch_that_memory_decided_keeps_its_size_on_other_ranks() -> None:
    before = started("ds_configs/zero2.json", 2)
    for world in (1, 4, 8):
        now = started("ds_configs/zero2.json", world, before=before)
        assert now["ds"]["train_batch_size"] == before["ds"]["train_batch_size"]
        assert changes(before, now, world_size=world) == []


def test_a_given_micro_batch_keeps_the_global_batch_and_may_be_changed_with_the_ranks() -> None:
    micro = ("--train.micro_batch_size", "8")
    before = started("ds_configs/zero2.json", 2, *micro)
    whole = before["ds"]["train_batch_size"]
    now = started("ds_configs/zero2.json", 1, *micro, before=before)
    assert now["ds"]["train_batch_size"] == whole and changes(before, now, world_size=1) == []
    smaller = ("--train.micro_batch_size", "4")
    now = started("ds_configs/zero2.json", 4, *smaller, before=before)
    assert now["ds"]["train_batch_size"] == whole and changes(before, now, world_size=4) == []
    (line,) = changes(before, started("ds_configs/zero2.json", 2, *smaller, before=before), world_size=2)[:1]
    assert line.startswith("train.micro_batch_size: 8 -> 4")


def test_a_batch_that_the_json_fixes_for_a_rank_changes_with_the_ranks_and_is_told() -> None:
    fixed = ("--ds.train_micro_batch_size_per_gpu", "8", "--ds.gradient_accumulation_steps", "1")
    before = started("ds_configs/zero2.json", 2, *fixed)
    lines = changes(before, started("ds_configs/zero2.json", 4, *fixed, before=before), world_size=4)
    assert lines[0] == "ds.train_batch_size: 16 -> 32" and lines[1].startswith("(ranks: 2 -> 4; with")


def test_ranks_that_cannot_share_the_batch_of_the_run_are_told_so() -> None:
    micro = ("--train.micro_batch_size", "8")
    before = started("ds_configs/zero2.json", 2, *micro)
    whole = before["ds"]["train_batch_size"]
    with pytest.raises(ConfigError, match=rf"takes {whole} pairs a step .* of {whole // 4} ranks x micro 8: start it"):
        started("ds_configs/zero2.json", whole // 4, *micro, before=before)
    with pytest.raises(ConfigError, match=f"takes {whole} pairs a step .* of 3 ranks: start it with another number"):
        started("ds_configs/zero2.json", 3, before=before)


def test_the_pairs_of_a_batch_norm_stay_where_memory_allows() -> None:
    """sync: of all ranks together; local: of each rank."""
    for policy, micros in (("sync", {1: 48, 2: 24, 4: 12}), ("local", {1: 24, 2: 24, 4: 24})):
        flags = ("--model.batch_norm", policy, "--train.global_batch_size", "96")
        fixed = ("--ds.train_micro_batch_size_per_gpu", "24", "--ds.gradient_accumulation_steps", "2")
        before = started("ds_configs/zero2.json", 2, *flags, *fixed)
        for world, micro in micros.items():
            now = started("ds_configs/zero2.json", world, *flags, before=before)
            assert now["ds"]["train_micro_batch_size_per_gpu"] == micro, (policy, world)
    crowded = kept_micro(Batch(24, 2, 96), world_size=1, over_ranks=True, largest_micro=30)
    assert crowded == 24, "no more than fits"


@pytest.mark.parametrize(("kind", "told"), [("micro", "32 -> 16"), ("local", None), ("global", None)])
def test_fewer_negatives_are_a_change(kind: str, told: str | None) -> None:
    flags = ("--objective.negatives", kind, "--train.micro_batch_size", "16", "--train.global_batch_size", "64")
    before = started("ds_configs/zero2.json", 2, *flags)
    lines = changes(before, started("ds_configs/zero2.json", 1, *flags, before=before), world_size=1)
    expected = [] if told is None else [f"pairs that a clip is compared with (negatives {kind}): {told}"]
    assert lines == expected


def test_on_the_same_ranks_and_stage_every_key_counts() -> None:
    before = started("ds_configs/zero2.json", 2)
    now = started("ds_configs/zero2.json", 2, "--ds.zero_optimization.overlap_comm", "false", before=before)
    assert changes(before, now, world_size=2) == ["ds.zero_optimization.overlap_comm: true -> false"]


def test_another_precision_is_a_change_whatever_the_ranks() -> None:
    before = started("ds_configs/zero2.json", 2)
    for world in (2, 4):
        now = started("ds_configs/zero2.json", world, "--ds.bf16", "null", before=before)
        assert any(
            line.startswith("ds.bf16.enabled: true -> absent") for line in changes(before, now, world_size=world)
        )


@pytest.mark.parametrize(
    ("json", "stage", "flag", "value"),
    [
        ("zero3", "3", "zero_optimization.zero_quantized_gradients", "true"),
        ("zero2", "2", "data_types.grad_accum_dtype", "bf16"),
        ("zero2", "3", "data_types.grad_accum_dtype", "bf16"),
    ],
)
def test_other_ranks_hide_no_other_rounding(json: str, stage: str, flag: str, value: str) -> None:
    flags = ("--train.global_batch_size", "96")
    before = started(f"ds_configs/{json}.json", 2, *flags)
    more = ("--ds.zero_optimization.stage", stage, f"--ds.{flag}", value)
    now = started(f"ds_configs/{json}.json", 4, *flags, *more, before=before)
    (line,) = changes(before, now, world_size=4)
    assert line.startswith(f"ds.{flag}: ")


def test_a_lost_record_of_the_ds_config_is_a_change_with_every_kind_of_negatives() -> None:
    now = started("ds_configs/zero2.json", 2, "--objective.negatives", "local")
    lines = changes(now | {"ds": {}}, now, world_size=2)
    assert any(line.startswith("ds.train_batch_size: absent -> ") for line in lines)
