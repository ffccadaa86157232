"""A checkpoint in an engine of other ranks, another stage or precision: masters, moments, and the next losses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from clap_zero.checkpoint.store import CheckpointStore
from clap_zero.testing import run_distributed
from tests.distributed.toy_engine import make_engine, read_weights, state_at

STEPS = 3
GLOBAL = 8
EXACT = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True, "weight_decay": 0.01, "eps": 1e-4}}}
"""With a tiny eps single elements of two right runs differ by a whole learning rate."""


def train_in_parts(engine: Any, start: int, steps: int) -> list[float]:
    """Steps on batches that do not depend on the number of ranks; the mean loss of each."""
    from clap_zero.distributed.collectives import all_reduce_sum, rank_and_size

    rank, world = rank_and_size()
    share = GLOBAL // world
    engine.eval()  # BatchNorm and dropout would see other parts
    losses = []
    for step in range(start, start + steps):
        ids = torch.randint(4099, (GLOBAL,), generator=torch.Generator().manual_seed(step))
        loss = engine(ids[rank * share : (rank + 1) * share])
        engine.backward(loss)
        engine.step()
        losses.append(all_reduce_sum(loss.detach()).item() / world)
    engine.train()
    return losses


def engine_of(
    stage: int,
    precision: str = "fp32",
    *,
    offload: bool = False,
    fused: bool = False,
    round_robin: bool = False,
    **changes: Any,
) -> Any:
    import deepspeed.runtime.engine

    from clap_zero.distributed.collectives import rank_and_size

    settings = {"train_micro_batch_size_per_gpu": GLOBAL // rank_and_size()[1]} | EXACT
    if precision == "bf16" and stage > 0:
        settings |= {"data_types": {"grad_accum_dtype": "fp32"}}  # stage 1 has an optimizer of its own for it
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 0}
    if offload and stage > 0:
        zero |= {"offload_optimizer": {"device": "cpu"}}
        settings |= {"zero_force_ds_cpu_optimizer": False}
    if round_robin and 0 < stage < 3:
        zero |= {"round_robin_gradients": True}
    settings |= {"zero_optimization": zero}
    # On GPUs stage 0 has another wrapper in half precision, around the fused Adam; torch's stands in for that one.
    fused_adam = torch.optim.AdamW if fused else deepspeed.ops.adam.FusedAdam
    with mock.patch.object(deepspeed.runtime.engine, "FusedAdam", fused_adam):
        engine = make_engine(stage, precision, 0, **settings | changes)
    assert hasattr(engine.optimizer, "fp32_groups_flat") == (fused and stage == 0)
    return engine


def whole_states(engine: Any) -> dict[str, Tensor]:
    """Masters and per-element states of all ranks as whole tensors, summed piece by piece; the largest step."""
    from clap_zero.checkpoint.layout import base_optimizer, is_scalar, masters, pieces
    from clap_zero.checkpoint.masters import full_shape
    from clap_zero.distributed.collectives import all_reduce_sum, rank_and_size

    ours, optimizer = masters(engine), base_optimizer(engine)
    own = list(pieces(engine)) if engine.zero_optimization_stage() or rank_and_size()[0] == 0 else []
    sizes = {name: full_shape(value).numel() for name, value in engine.module.named_parameters()}
    # Sorted and without those of a rank that has none: all ranks sum the same.
    keys = [key for key, value in sorted(optimizer.state[ours[0]].items()) if value is not None]
    states = {}
    for key in ["master", *(key for key in keys if not is_scalar(optimizer.state[ours[0]][key]))]:
        whole = {name: torch.zeros(size) for name, size in sizes.items()}
        for name, start, size, master, offset in own:
            values = ours[master] if key == "master" else optimizer.state[ours[master]][key]
            whole[name][start : start + size] = values.detach().reshape(-1)[offset : offset + size]
        states |= {f"{key} {name}": all_reduce_sum(value) for name, value in whole.items()}
    steps = [float(optimizer.state[master]["step"]) for master in ours if "step" in optimizer.state.get(master, {})]
    return states | {"step": torch.tensor(max(steps, default=0.0))}


def forward_weights(engine: Any) -> dict[str, Tensor]:
    """What the forward uses, as whole tensors: all parameters, those that are not trained, too."""
    import deepspeed

    parameters = dict(engine.module.named_parameters())
    with deepspeed.zero.GatheredParameters(list(parameters.values()), enabled=engine.zero_optimization_stage() == 3):
        return {name: value.detach().float().clone() for name, value in parameters.items()}


def numbers(engine: Any) -> dict[str, Any]:
    return {
        "rate": engine.optimizer.param_groups[0]["lr"],
        "steps": (engine.global_steps, engine.global_samples, engine.skipped_steps),
        "scheduler": engine.lr_scheduler.state_dict(),
        "scale": engine.optimizer.loss_scale if engine.fp16_enabled() else None,
    }


def save_and_go_on(root: str, stage: int, precision: str, changes: dict[str, Any]) -> dict[str, Any]:
    from clap_zero.checkpoint.state import save
    from clap_zero.distributed.collectives import rank_and_size

    engine = engine_of(stage, precision, **changes)
    losses = train_in_parts(engine, 0, STEPS)
    with torch.no_grad():  # as if the ranks had seen different data
        engine.module.norm.running_mean += rank_and_size()[0]
    state = state_at(STEPS, stage)
    path = save(engine, CheckpointStore(root), state)
    result = {"path": str(path), "state": state, "states": whole_states(engine), "numbers": numbers(engine)}
    result["weights"] = forward_weights(engine)
    result["statistics"] = engine.module.norm.running_mean.clone()
    engine.module.norm.reset_running_stats()
    return result | {"losses": train_in_parts(engine, STEPS, STEPS), "before": losses}


def go_on(path: str, stages: list[int], precision: str, changes: dict[str, Any]) -> list[dict[str, Any]]:
    from clap_zero.checkpoint.state import load

    results = []
    for stage in stages:
        engine = engine_of(stage, precision, **changes)
        with torch.no_grad():
            for value in (engine.module.frozen, engine.module.norm.running_mean):
                getattr(value, "ds_tensor", value).fill_(9)
        state = load(engine, Path(path))
        result = {"state": state, "states": whole_states(engine), "numbers": numbers(engine)}
        result["statistics"] = engine.module.norm.running_mean.clone()
        engine.module.norm.reset_running_stats()
        result["weights"] = forward_weights(engine)
        results.append(result | {"losses": train_in_parts(engine, STEPS, STEPS)})
    return results


def check(
    tmp_path: Path, there: tuple[int, int], here: dict[int, list[int]], precision: str = "fp32", **changes: Any
) -> dict[str, Any]:
    """Saved by (ranks, stage), loaded by ranks -> stages. Returns what was saved."""
    ranks, stage = there
    saved = run_distributed(save_and_go_on, ranks, str(tmp_path), stage, precision, changes)
    consolidated = read_weights(Path(saved[0]["path"]))
    for name, value in saved[0]["weights"].items() if precision == "fp32" else ():
        assert torch.equal(consolidated[name].view_as(value), value), f"{name} of the checkpoint's weights"
    statistics = torch.stack([one["statistics"] for one in saved]).mean(0)
    assert ranks == 1 or not torch.equal(saved[0]["statistics"], statistics)
    for world, stages in here.items():
        for rank, results in enumerate(run_distributed(go_on, world, saved[0]["path"], stages, precision, changes)):
            for other, result in zip(stages, results, strict=True):
                case = f"{ranks} ranks at stage {stage} -> {world} at {other}"
                for kind in ("states", "weights"):
                    assert result[kind].keys() == saved[0][kind].keys(), case
                    for name, value in saved[0][kind].items():
                        assert torch.equal(result[kind][name], value), (case, kind, name)
                assert result["numbers"] == saved[0]["numbers"], case
                assert result["state"] == replace(saved[0]["state"], world_size=world, stage=other), case
                expected = saved[rank]["statistics"] if world == ranks else statistics
                assert torch.allclose(result["statistics"], expected, rtol=0, atol=1e-7 * (world != ranks)), case
                tolerance = 1e-6 if precision == "fp32" else 1e-2
                assert result["losses"] == pytest.approx(saved[0]["losses"], rel=tolerance), case
    return saved[0]


ALL = [0, 1, 2, 3]


@pytest.mark.parametrize(
    "stage", [pytest.param(0, marks=pytest.mark.long), pytest.param(1, marks=pytest.mark.long), 2, 3]
)
def test_two_ranks_go_on_as_one_two_and_four_at_every_stage(tmp_path: Path, stage: int) -> None:
    check(tmp_path, (2, stage), {1: ALL, 2: [other for other in ALL if other != stage], 4: ALL})


def test_parameters_that_are_dealt_out_in_turn(tmp_path: Path) -> None:
    """round_robin_gradients: DeepSpeed's own map of its masters is wrong there."""
    saved = check(tmp_path, (2, 2), {1: [2, 3], 4: [0, 1]}, round_robin=True)
    # DeepSpeed itself reads by position: without an error it would mix up the weights where only this setting differs.
    for (result,) in run_distributed(go_on, 2, saved["path"], [2], "fp32", {}):
        assert_equal(result, saved)


def assert_equal(result: dict[str, Any], saved: dict[str, Any]) -> None:
    for kind in ("states", "weights"):
        for name, value in saved[kind].items():
            assert torch.equal(result[kind][name], value), (kind, name)


@pytest.mark.long
def test_another_size_of_sub_groups_on_the_same_ranks(tmp_path: Path) -> None:
    saved = run_distributed(save_and_go_on, 2, str(tmp_path), 3, "fp32", {})[0]
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "sub_group_size": 500}
    for (result,) in run_distributed(go_on, 2, saved["path"], [3], "fp32", {"zero_optimization": zero}):
        assert_equal(result, saved)


@pytest.mark.long
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", ALL)
def test_half_precision_keeps_masters_moments_and_loss_scale(tmp_path: Path, stage: int, precision: str) -> None:
    check(tmp_path, (2, stage), {1: ALL, 2: [other for other in ALL if other != stage], 4: [2, 3]}, precision)


@pytest.mark.long
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 3])
def test_the_wrapper_around_a_fused_optimizer(tmp_path: Path, stage: int, precision: str) -> None:
    check(tmp_path, (2, stage), {1: [0, 2, 3], 4: [0, 1]}, precision, fused=True)


@pytest.mark.long
@pytest.mark.parametrize("stage", [2, 3])
def test_a_loss_scale_that_fell_stays_down(tmp_path: Path, stage: int) -> None:
    """The next steps may differ: on other ranks other sums overflow."""
    changes = {"fp16": {"enabled": True, "initial_scale_power": 13, "hysteresis": 1}}
    saved = run_distributed(save_and_go_on, 2, str(tmp_path), stage, "fp16", changes)[0]["numbers"]
    assert STEPS > saved["steps"][2] > 0 and saved["scale"] < 2**13
    for world in (1, 4):
        for results in run_distributed(go_on, world, str(tmp_path / "step-00000003"), ALL, "fp16", changes):
            assert [result["numbers"] for result in results] == [saved] * len(ALL)


def test_another_precision_keeps_masters_and_moments(tmp_path: Path) -> None:
    saved = run_distributed(save_and_go_on, 2, str(tmp_path), 2, "fp32", {})[0]
    for results in run_distributed(go_on, 2, saved["path"], [2, 3], "bf16", {}):
        for result in results:
            for name, value in saved["states"].items():
                assert torch.equal(result["states"][name], value) or name == "master frozen", name
                if name.startswith("master"):
                    weights = result["weights"][name.removeprefix("master ")]
                    assert torch.equal(weights, value.view_as(weights).bfloat16().float()) or name == "master frozen"


def load_with_other_settings(root: str) -> list[tuple[float, float, float]]:
    from clap_zero.checkpoint.state import load, save

    engine = engine_of(2)
    train_in_parts(engine, 0, 1)
    path = save(engine, CheckpointStore(root), state_at(1, 2))
    other = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True, "weight_decay": 0.5, "eps": 1e-3}}
    found = []
    for stage in (2, 3):
        engine = engine_of(stage, gradient_clipping=2.0, optimizer=other)
        load(engine, path)
        group = engine.optimizer.param_groups[0]
        found.append((group["weight_decay"], group["eps"], engine.optimizer.clip_grad))
    return found


def test_settings_that_were_changed_on_purpose_are_those_of_the_start(tmp_path: Path) -> None:
    """Converted or not: torch and DeepSpeed would take those of the checkpoint."""
    assert run_distributed(load_with_other_settings, 1, str(tmp_path)) == [[(0.5, 1e-3, 2.0)] * 2]


def lose_a_piece(path: str, name: str) -> str:
    """The layout of a rank's file without a parameter, as if the checkpoint had been saved without it."""
    import json

    from safetensors import safe_open

    from clap_zero.checkpoint import relayout
    from clap_zero.checkpoint.files import save_tensors
    from clap_zero.checkpoint.manifest import read_manifest
    from clap_zero.errors import CheckpointError

    file = Path(path) / "rank-00001.safetensors"
    with safe_open(file, framework="pt") as saved:
        layout = [piece for piece in json.loads(saved.metadata()[relayout.METADATA]) if piece[0] != name]
        tensors = {key: saved.get_tensor(key).clone() for key in saved.keys()}  # noqa: SIM118
    save_tensors(file, tensors, {relayout.METADATA: json.dumps(layout)})
    try:
        relayout.restore(engine_of(2), Path(path), read_manifest(Path(path)))
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_part_of_the_state_is_never_enough(tmp_path: Path) -> None:
    saved = run_distributed(save_and_go_on, 2, str(tmp_path), 3, "fp32", {})[0]
    (message,) = run_distributed(lose_a_piece, 1, saved["path"], "head.weight")
    assert "could not be converted" in message and "101 weights of this rank are in none of its files" in message


@pytest.mark.long
@pytest.mark.parametrize("there", [(1, 0), (4, 2), (4, 3)], ids=str)
def test_one_and_four_ranks_go_on_as_others(tmp_path: Path, there: tuple[int, int]) -> None:
    check(tmp_path, there, {world: ALL for world in (1, 2, 4) if world != there[0]})


@pytest.mark.long
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_optimizer_in_cpu_memory(tmp_path: Path, stage: int) -> None:
    check(tmp_path, (2, stage), {1: [1, 2, 3], 4: [1, 2, 3]}, offload=True)


OPTIMIZERS = {
    "AdamW": {"lr": 1e-2, "eps": 1e-4, "torch_adam": True, "fused": True},
    "SGD": {"lr": 1e-2, "momentum": 0.9},
    "Adagrad": {"lr": 1e-2, "eps": 1e-4},
    "NAdam": {"lr": 1e-2, "eps": 1e-4},
}


@pytest.mark.long
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_other_optimizers(tmp_path: Path, name: str) -> None:
    optimizer = {"type": name, "params": OPTIMIZERS[name]}
    check(tmp_path, (2, 2), {1: ALL, 4: [3]}, optimizer=optimizer, zero_allow_untested_optimizer=True)
