"""Saving and resuming on real ranks: bit-equal continuation and whole masters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from clap_zero.checkpoint.store import CheckpointStore
from clap_zero.testing import run_distributed
from tests.distributed.toy_engine import make_engine, masters, read_weights, state_at, train

STEPS = 3


def save_and_resume(root: str, stage: int, precision: str, threshold: int) -> dict[str, Any]:
    from clap_zero.checkpoint.buffers import persistent_buffers
    from clap_zero.checkpoint.state import load, save

    store = CheckpointStore(Path(root) / "checkpoints")
    engine = make_engine(stage, precision, threshold)
    train(engine, 0, STEPS)
    path = save(engine, store, state_at(STEPS, stage))
    at_save = masters(engine)
    random_state = torch.get_rng_state()
    buffers = {name: value.clone() for name, value in persistent_buffers(engine.module).items()}
    straight = train(engine, STEPS, STEPS)
    end = masters(engine)
    skipped = engine.skipped_steps

    fresh = make_engine(stage, precision, threshold)
    with torch.no_grad():
        for value in persistent_buffers(fresh.module).values():
            value.fill_(9)
    train(fresh, 50, 2) if stage < 3 else None  # stage 3 can only load into a fresh engine
    state = load(fresh, path)
    torch.set_rng_state(random_state)  # a run seeds every micro batch anew
    return {
        "path": str(path),
        "at_save": at_save,
        "buffers": buffers,
        "restored": {name: value.clone() for name, value in persistent_buffers(fresh.module).items()},
        "straight": straight,
        "resumed": train(fresh, STEPS, STEPS),
        "end": end,
        "resumed_end": masters(fresh),
        "state": state,
        "skipped": (skipped, fresh.skipped_steps),
        "learning_rate": (engine.get_lr(), fresh.get_lr()),
        "loss_scale": (getattr(engine.optimizer, "cur_scale", None), getattr(fresh.optimizer, "cur_scale", None)),
    }


CASES = [(stage, "fp32", 100_000) for stage in (0, 1, 2, 3)] + [(3, "fp32", 0)]
LONG_CASES = [(stage, precision, 0) for precision in ("bf16", "fp16") for stage in (0, 1, 2, 3)]


@pytest.mark.parametrize("case", CASES + [pytest.param(case, marks=pytest.mark.long) for case in LONG_CASES], ids=str)
def test_a_resumed_run_continues_bit_for_bit(tmp_path: Path, case: tuple[int, str, int]) -> None:
    results = run_distributed(save_and_resume, 2, str(tmp_path), *case)
    path = Path(results[0]["path"])
    weights = read_weights(path)
    assert weights["logit_scale_a"].shape == ()
    assert "scratch" not in weights and torch.equal(weights["index"], torch.arange(5))
    if case[1] != "fp32":
        rounded = weights["embedding.weight"].to({"bf16": torch.bfloat16, "fp16": torch.float16}[case[1]])
        assert not torch.equal(rounded.float(), weights["embedding.weight"]), "parameters were saved for masters"
    for rank, result in enumerate(results):
        for name, value in result["at_save"].items():
            assert weights[name].dtype == torch.float32
            assert torch.equal(weights[name].reshape(value.shape).to(value.dtype), value), name
        for name, value in result["buffers"].items():
            assert torch.equal(result["restored"][name], value), (rank, name)
        assert result["resumed"] == pytest.approx(result["straight"], rel=1e-6)
        for name, value in result["end"].items():
            assert torch.equal(result["resumed_end"][name], value), (rank, name)
        assert result["state"].step == STEPS
        for kept in ("skipped", "learning_rate", "loss_scale"):
            assert result[kept][0] == result[kept][1]
    means = [result["buffers"]["norm.running_mean"].float() for result in results]
    assert not torch.equal(*means), "the ranks saw different data, so their own statistics must differ"
    assert torch.allclose(weights["norm.running_mean"], (means[0] + means[1]) / 2, atol=1e-7)


def skip_a_step(root: str) -> dict[str, Any]:
    from clap_zero.checkpoint.state import load, save

    changes = {"fp16": {"enabled": True, "initial_scale_power": 14, "hysteresis": 1}}
    engine = make_engine(2, "fp16", 0, **changes)
    train(engine, 0, 8)
    path = save(engine, CheckpointStore(Path(root)), state_at(8, 2))
    fresh = make_engine(2, "fp16", 0, **changes)
    first = fresh.optimizer.cur_scale
    load(fresh, path)
    result = {
        "skipped": (engine.skipped_steps, fresh.skipped_steps),
        "scale": (engine.optimizer.cur_scale, fresh.optimizer.cur_scale),
        "first": first,
        "rate": (engine.get_lr(), fresh.get_lr()),
    }
    random_state = torch.get_rng_state()
    losses = [train(fresh, 8, 2)]
    torch.set_rng_state(random_state)
    losses.append(train(engine, 8, 2))
    return result | {"losses": losses}


@pytest.mark.long
def test_fp16_keeps_its_loss_scale_and_its_skipped_steps(tmp_path: Path) -> None:
    for result in run_distributed(skip_a_step, 2, str(tmp_path)):
        assert 8 > result["skipped"][0] == result["skipped"][1] > 0
        assert result["scale"][0] == result["scale"][1] < result["first"]
        assert result["rate"][0] == result["rate"][1]
        assert result["losses"][0] == result["losses"][1]
