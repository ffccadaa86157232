"""Building at every stage: equal weights, really partitioned, and pretrained weights in their places."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from clap_zero.distributed.collectives import rank_and_size
from clap_zero.errors import CheckpointError
from clap_zero.testing import run_distributed
from tests.distributed import zero_cases as zc


def whole_state(model: torch.nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers as they would be saved."""
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return {name: tensor.detach().float().clone() for name, tensor in model.state_dict().items()}


def built(stage: int, precision: str, weights: Path | None) -> dict[str, Tensor]:
    _, world = rank_and_size()
    config = zc.ds_config(stage, micro_batch=2, world=world, precision=precision)
    model = zc.build(config, fused=True, weights=weights)
    state = whole_state(model)
    kept = {b.dtype for n, b in model.named_buffers() if "running" in n}
    assert kept == {torch.float32}
    restore_linear()
    return state


def restore_linear() -> None:
    from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses as Patches

    if hasattr(Patches, "linear_bk"):
        torch.nn.functional.linear = Patches.linear_bk


@pytest.mark.parametrize(("stage", "world"), [(0, 2), (2, 2), (3, 2), (3, 1)])
def test_initial_weights_are_equal_for_every_stage_and_world(stage: int, world: int) -> None:
    expected = zc.build({}, fused=True).state_dict()
    for state in run_distributed(built, world, stage, "fp32", None):
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[n], expected[n].float()) for n in expected)


def test_partitioned_half_precision_weights_are_the_same_ones_rounded() -> None:
    expected = zc.build({}, fused=True)
    for state in run_distributed(built, 2, 3, "bf16", None):
        for name, tensor in expected.named_parameters():
            assert torch.equal(state[name], tensor.bfloat16().float()), name


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights and statistics that no new model has."""
    model = zc.build({}, fused=True, seed=12)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.add_(0.01 * torch.rand(tensor.shape))
    return zc.save_weights(model, tmp_path_factory.mktemp("weights"))


@pytest.mark.parametrize("stage", [2, 3])
def test_pretrained_weights_arrive_on_all_ranks(stage: int, weights: Path) -> None:
    """BatchNorm's statistics too, which no stage spreads by itself."""
    expected = zc.build({}, fused=True, weights=weights).state_dict()
    for state in run_distributed(built, 2, stage, "fp32", weights):
        assert all(torch.equal(state[n], expected[n].float()) for n in expected)


def test_weights_that_do_not_fit_fail_on_all_ranks(weights: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    state = load_file(weights / "model.safetensors")
    del state["text_projection.linear1.weight"]
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((weights / "config.json").read_text())
    for message in run_distributed(error_of_building, 2, tmp_path):
        assert "missing: text_projection.linear1.weight" in message


def error_of_building(weights: Path) -> str:
    try:
        built(3, "fp32", weights)
    except CheckpointError as error:
        return str(error)
    finally:
        restore_linear()
    return ""


def partitioning(weights: Path | None) -> dict[str, Any]:
    """What a rank holds during and after the construction at stage 3, in elements."""
    import deepspeed
    from deepspeed.runtime.zero.partition_parameters import Init, ZeroParamStatus

    held: list[int] = []
    created: list[torch.nn.Parameter] = []

    def watch(self: Init, module: torch.nn.Module) -> None:
        created.extend(module.parameters(recurse=False))
        held.append(sum(p.numel() for p in created))
        original_init(self, module)

    def watch_gather(self: Any) -> Any:
        result = original_enter(self)
        held.append(sum(p.numel() for p in created))
        return result

    original_init, original_enter = Init._post_init_method, deepspeed.zero.GatheredParameters.__enter__
    Init._post_init_method, deepspeed.zero.GatheredParameters.__enter__ = watch, watch_gather
    try:
        _, world = rank_and_size()
        model = zc.build(zc.ds_config(3, micro_batch=2, world=world), fused=True, weights=weights)
    finally:
        Init._post_init_method, deepspeed.zero.GatheredParameters.__enter__ = original_init, original_enter
        restore_linear()
    parameters = list(model.parameters())
    return {
        "gone": all(p.ds_status == ZeroParamStatus.NOT_AVAILABLE and p.numel() == 0 for p in parameters),
        "whole": sum(p.ds_numel for p in parameters),
        "share": sum(p.ds_tensor.numel() for p in parameters),
        "padding": len(parameters),
        "peak": max(held),
        "largest": max(p.ds_numel for p in parameters),
    }


@pytest.mark.parametrize("pretrained", [False, True])
def test_no_rank_ever_holds_the_whole_model(pretrained: bool, weights: Path) -> None:
    for rank in run_distributed(partitioning, 2, weights if pretrained else None):
        assert rank["gone"]
        assert rank["share"] <= rank["whole"] / 2 + rank["padding"]
        # One module at a time (and its parent's own parameters) is whole.
        assert rank["largest"] <= rank["peak"] < rank["whole"] / 3
