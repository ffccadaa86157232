"""Schedules of torch in the JSON: refused where the engine could not be built with them."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from clap_zero.config.deepspeed import Machine, ResolvedDeepSpeed, resolve
from clap_zero.config.ds_torch_schedules import REQUIRED, TORCH_SCHEDULES
from clap_zero.config.load import parse_command_line
from clap_zero.errors import ConfigError

NOT_IN_JSON = {"self", "optimizer", "last_epoch", "scale_fn"}


def solve(kind: str, params: dict[str, Any], *, stage: int = 0, bf16: bool = False) -> ResolvedDeepSpeed:
    machine = Machine(memory_bytes=0, num_samples=500, device_type="cpu")
    run = parse_command_line(["--ds_config", "x.json", "--train.max_steps", "100"]).run
    ds = {
        "scheduler": {"type": kind, "params": params},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": bf16},
    }
    return resolve(ds, run, world_size=1, machine=machine)


def test_tables_are_the_signatures_of_torch() -> None:
    for kind, table in TORCH_SCHEDULES.items():
        parameters = inspect.signature(getattr(torch.optim.lr_scheduler, kind).__init__).parameters
        ours = {name: p for name, p in parameters.items() if name not in NOT_IN_JSON}
        assert set(table) == set(ours), kind
        assert list(REQUIRED.get(kind, ())) == [n for n, p in ours.items() if p.default is p.empty], kind


@pytest.mark.long
def test_torch_takes_no_wrapper_of_deepspeed_for_an_optimizer() -> None:
    from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer

    with pytest.raises(TypeError, match="is not an Optimizer"):
        torch.optim.lr_scheduler.StepLR(DeepSpeedOptimizer(), step_size=5)


@pytest.mark.parametrize(
    ("kind", "params", "keywords", "message"),
    [
        ("StepLR", {"step_size": 5}, {"stage": 2}, "not with zero_optimization.stage 2: use WarmupCosineLR"),
        ("StepLR", {"step_size": 5}, {"bf16": True}, "not with bf16.enabled true: use WarmupCosineLR"),
        ("CosineAnnealingLR", {}, {}, "scheduler.params.T_max is missing: scheduler.type CosineAnnealingLR needs it"),
        (
            "CosineAnnealingLR",
            {"T_maxx": 5},
            {},
            "unknown key scheduler.params.T_maxx: did you mean scheduler.params.T_max?",
        ),
        ("CosineAnnealingWarmRestarts", {"T_0": 0}, {}, "scheduler.params.T_0 is 0: 1 or more is needed"),
        ("OneCycleLR", {"max_lr": 1e-3}, {}, "scheduler.params.total_steps is missing"),
        (
            "OneCycleLR",
            {"max_lr": 1e-3, "total_steps": 40},
            {},
            "ends after 40 steps and stops there, and the run has 100",
        ),
        ("ReduceLROnPlateau", {}, {}, "scheduler.type ReduceLROnPlateau is not known: "),
        ("steplr", {"step_size": 5}, {}, "scheduler.type steplr is not known: did you mean StepLR?"),
    ],
)
def test_what_the_engine_would_die_of_is_refused(kind: str, params: dict, keywords: dict, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        solve(kind, params, **keywords)
    assert message in str(caught.value)


def test_at_stage_0_in_fp32_they_pass() -> None:
    assert solve("StepLR", {"step_size": 5}).config["scheduler"] == {"type": "StepLR", "params": {"step_size": 5}}


def test_other_numbers_without_a_sense() -> None:
    with pytest.raises(ConfigError, match=r"^scheduler.params.warmup_min_lr 0.001 is above warmup_max_lr 0.0001: "):
        solve("WarmupLR", {"warmup_min_lr": 1e-3, "warmup_max_lr": 1e-4, "warmup_num_steps": 3}, stage=2)
