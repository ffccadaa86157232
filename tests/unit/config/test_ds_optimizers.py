"""Optimizers in the JSON: what passes can be made and stepped, what cannot is refused in one line."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from clap_zero.config.deepspeed import Machine, ResolvedDeepSpeed, resolve
from clap_zero.config.ds_optimizer_params import CHOOSING_ADAM, OPTIMIZER_PARAMS
from clap_zero.config.ds_side_keys import BOOL, FLOAT, LIST
from clap_zero.config.load import parse_command_line
from clap_zero.errors import ConfigError

TORCHS = (*("Adam", "AdamW", "Adagrad", "SGD", "RMSprop", "NAdam", "RAdam", "Adamax", "Adadelta", "ASGD", "Adafactor"),)
ODD: dict[str, tuple[Any, ...]] = {
    FLOAT: (-1.0, 0, 1e-300, 0.5, 1, 1.5, 1e300),
    LIST: ([], [0.9], [-0.1, 0.9], [0.9, 1], ["a", "b"], [0.9, 0.9, 0.9], [None, 1e-3]),
    BOOL: (True, False),
}


def solve(kind: str, params: dict[str, Any], *, stage: int = 0, **more: Any) -> ResolvedDeepSpeed:
    machine = Machine(memory_bytes=0, num_samples=500, device_type="cpu")
    run = parse_command_line(["--ds_config", "x.json", "--train.max_steps", "100"]).run
    zero = {"stage": stage} | more.pop("zero", {})
    ds = {"optimizer": {"type": kind, "params": params}, "zero_optimization": zero, **more}
    return resolve(ds, run, world_size=1, machine=machine)


@pytest.mark.parametrize("kind", TORCHS)
def test_what_passes_can_be_used(kind: str) -> None:
    num_passed = 0
    for name, sort in OPTIMIZER_PARAMS[kind.lower()].items():
        for value in ODD[sort]:
            if name == "torch_adam" and value is False:
                continue  # DeepSpeed's own, which would be compiled
            try:
                params = solve(kind, {name: value}).config["optimizer"]["params"]
            except ConfigError as error:
                assert "\n" not in str(error) and f"optimizer.params.{name}" in str(error)
                continue
            weights = [torch.nn.Parameter(torch.zeros(2, 3)) for _ in range(2)]
            taken = {key: entry for key, entry in params.items() if key not in CHOOSING_ADAM}
            optimizer = getattr(torch.optim, kind)([{"params": [weight]} for weight in weights], **taken)
            for _ in range(3):
                for weight in weights:
                    weight.grad = torch.full((2, 3), 0.1)
                optimizer.step()
            assert all(bool(weight.isfinite().all()) for weight in weights), (name, value)
            num_passed += 1
    assert num_passed > len(OPTIMIZER_PARAMS[kind.lower()]) / 2


@pytest.mark.parametrize(
    ("kind", "params", "more", "message"),
    [
        ("SGD", {"nesterov": True}, {}, "nesterov true needs optimizer.params.momentum above 0"),
        ("AdamW", {"fused": True, "foreach": True}, {}, "exclude each other"),
        ("Adafactor", {"eps": [-1, 1e-3]}, {}, "both 0 or more, are needed"),
        ("Adagrad", {}, {"stage": 2}, "optimizer.type Adagrad at zero_optimization.stage 2: "),
        ("Muon", {}, {"stage": 3}, "needs whole gradients: set zero_optimization.reduce_scatter to false"),
        ("Muon", {"muon_lr": 0.02}, {"scheduler": {"type": "WarmupLR"}}, "muon_lr does nothing beside scheduler.type"),
        (
            "AdamW",
            {},
            {"stage": 3, "zero": {"prefetch_bucket_size": -1}},
            "zero_optimization.prefetch_bucket_size is -1: 0 or more is needed",
        ),
        ("FusedAdam", {}, {}, "optimizer.type FusedAdam is not known: did you mean AdamW?"),
        ("AdamW", {}, {"fp16": {"enabled": True, "min_loss_scale": 1e9}}, "the scale begins below it, at 65536"),
        ("MuAdam", {}, {"zero_allow_untested_optimizer": True}, "needs base shapes of the mup package"),
    ],
)
def test_what_the_engine_would_die_of_or_pass_over_is_refused(
    kind: str, params: dict, more: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        solve(kind, params, **more)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_muon_is_taken_where_it_works() -> None:
    assert solve("Muon", {}, stage=2).config["optimizer"]["params"]["torch_adam"], "on CPU nothing is compiled for it"
    assert solve("Muon", {"muon_lr": 0.02}, stage=3, zero={"reduce_scatter": False}).stage == 3
