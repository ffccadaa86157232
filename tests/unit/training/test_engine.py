"""Which parameters decay, with whole and with partitioned parameters."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from clap_zero.model.clap import Parts
from clap_zero.testing import run_distributed
from clap_zero.training.engine import parameter_groups
from tests.distributed import zero_cases as zc

SCALARS = {"logit_scale_a", "logit_scale_t", "logit_bias"}


def names_by_decay(config: dict[str, Any]) -> dict[float, list[str]]:
    model = zc.build(config, fused=True, parts=Parts(bias=True))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = parameter_groups(model, weight_decay=0.1)
    return {group["weight_decay"]: [names[id(parameter)] for parameter in group["params"]] for group in groups}


def test_matrices_decay_and_scales_norms_and_biases_do_not() -> None:
    decayed, plain = (names_by_decay({})[decay] for decay in (0.1, 0.0))
    model = zc.build({}, fused=True, parts=Parts(bias=True))
    assert sorted(decayed + plain) == sorted(name for name, _ in model.named_parameters())
    assert set(plain) >= SCALARS
    # By what a module is, where the rule goes by shapes and names.
    kinds = (nn.Linear, nn.Conv2d, nn.Embedding)
    weights = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, kinds)}
    assert set(decayed) == weights
    assert any("relative_position_bias_table" in name for name in plain)


def test_what_is_frozen_is_in_no_group() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    groups = parameter_groups(model, weight_decay=0.1)
    assert [group["params"] for group in groups] == [[model[1].weight], [model[1].bias]]
    model[1].weight.requires_grad_(False)
    assert [group["weight_decay"] for group in parameter_groups(model, weight_decay=0.1)] == [0.0]


def partitioned() -> tuple[dict[float, list[str]], bool]:
    config = zc.ds_config(3, micro_batch=2, world=1, stage3_param_persistence_threshold=0)
    model = zc.build(config, fused=True)
    return names_by_decay(config), all(parameter.numel() == 0 for parameter in model.parameters())


@pytest.mark.parametrize("world", [1])
def test_partitioned_parameters_are_told_apart_by_their_real_shape(world: int) -> None:
    [(groups, are_empty)] = run_distributed(partitioned, world)
    assert are_empty, "nothing was partitioned"
    assert groups == names_by_decay({})
