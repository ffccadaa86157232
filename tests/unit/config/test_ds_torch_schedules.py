"""Schedules of torch in the JSON: refused where the engine could not be built with them."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from deepspeed.runtime import lr_schedules

from clap_zero.config.deepspeed import Machine, ResolvedDeepSpeed, resolve
from clap_zero.config.ds_keys import SCHEDULER_PARAMS
from clap_zero.config.ds_side_keys import BOOL, FLOAT, INT, LIST
from clap_zero.config.ds_torch_schedules import REQUIRED, TORCH_SCHEDULES
from clap_zero.config.load import parse_command_line
from clap_zero.errors import ConfigError

NOT_IN_JSON = {"self", "optimizer", "last_epoch", "scale_fn"}


def solve(
    kind: str, params: dict[str, Any], *, stage: int = 0, bf16: bool = False, optimizer: str = "AdamW"
) -> ResolvedDeepSpeed:
    machine = Machine(memory_bytes=0, num_samples=500, device_type="cpu")
    run = parse_command_line(["--ds_config", "x.json", "--train.max_steps", "100"]).run
    ds = {
        "scheduler": {"type": kind, "params": params},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": bf16},
        "optimizer": {"type": optimizer},
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


SOME = {INT: (-1, 0, 1, 7, 2**62), FLOAT: (-1.0, 0, 1e-8, 0.5, 1, 2, 1e300), BOOL: (True, False)}
LISTS = ([], [2, 5], [-1], ["a"], [1.5], [[2]])
TEXTS = ("linear", "cos", "exp_range", "cycle", "wat", "")
NEEDED = {"step_size": 5, "milestones": [3], "gamma": 0.9, "T_max": 5, "T_0": 5, "base_lr": 0.1, "max_lr": 0.2}


def used(kind: str, params: dict[str, Any], *, optimizer: str) -> None:
    """Twelve steps of a schedule with an optimizer of two groups, as the engine would take them."""
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    groups = [{"params": [weight]} for weight in weights]
    stepped = getattr(torch.optim, optimizer)(groups, lr=1e-3)
    home = torch.optim.lr_scheduler if kind in TORCH_SCHEDULES else lr_schedules
    schedule = getattr(home, kind)(stepped, **params)
    for _ in range(12):
        for weight in weights:
            weight.grad = torch.ones(1)
        stepped.step()
        assert all(-1e-12 <= group["lr"] <= 1e9 for group in stepped.param_groups), stepped.param_groups[0]["lr"]
        schedule.step()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [*TORCH_SCHEDULES, *SCHEDULER_PARAMS])
def test_what_passes_can_be_used(kind: str) -> None:
    """Every parameter at odd values, one at a time: it is refused in one line, or torch and DeepSpeed can use it."""
    table = {**TORCH_SCHEDULES, **SCHEDULER_PARAMS}[kind]
    needed = {name: NEEDED[name] for name in REQUIRED.get(kind, ())}
    if kind == "OneCycleLR":
        needed["total_steps"] = 100
    if kind == "OneCycle":
        needed |= {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3}
    num_passed = 0
    for name, sort in table.items():
        for value in SOME.get(sort, LISTS if sort == LIST else TEXTS):
            for optimizer in ("AdamW", "Adagrad"):
                try:
                    resolved = solve(kind, {**needed, name: value}, optimizer=optimizer)
                except ConfigError as error:
                    assert ("\n" not in str(error) and f"scheduler.params.{name}" in str(error)) or kind in str(error)
                    continue
                used(kind, resolved.config["scheduler"]["params"], optimizer=optimizer)
                num_passed += 1
    assert num_passed > len(table)


def test_at_stage_0_in_fp32_they_pass() -> None:
    assert solve("StepLR", {"step_size": 5}).config["scheduler"] == {"type": "StepLR", "params": {"step_size": 5}}


def test_other_numbers_without_a_sense() -> None:
    with pytest.raises(ConfigError, match=r"^scheduler.params.warmup_min_lr 0.001 is above warmup_max_lr 0.0001: "):
        solve("WarmupLR", {"warmup_min_lr": 1e-3, "warmup_max_lr": 1e-4, "warmup_num_steps": 3}, stage=2)
