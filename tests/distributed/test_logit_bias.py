"""The bias of the sigmoid objective: trained at every stage, in checkpoints and exports, and read back."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import ClapModel

import clap_zero
from clap_zero.checkpoint.export import export_run
from clap_zero.errors import CheckpointError
from clap_zero.model.clap import ClapForContrast, Parts, build_model
from clap_zero.model.logit_bias import CONFIG_KEY
from clap_zero.objective.config import ObjectiveConfig
from clap_zero.testing import run_distributed
from clap_zero.training.objective import RunObjective
from tests.distributed.test_checkpoint_clap import inputs
from tests.unit.checkpoint.small_run import geometry

SIGMOID = RunObjective(ObjectiveConfig(loss="sigmoid", positives="off"))


def build(
    pretrained: Path | None, *, with_bias: bool | None, ds_config: dict[str, Any] | None = None
) -> ClapForContrast:
    return build_model(
        geometry=geometry(fusion=True) if pretrained is None else None,
        pretrained=None if pretrained is None else str(pretrained),
        batch_norm="sync",
        dropout=None,
        seed=3,
        ds_config=ds_config or {},
        device=torch.device("cpu"),
        parts=Parts(bias=with_bias),
    )


def make_engine(stage: int, *, with_bias: bool = True) -> Any:
    import deepspeed

    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "gradient_clipping": 1.0,
    }
    return deepspeed.initialize(model=build(None, with_bias=with_bias, ds_config=settings), config=settings)[0]


def bias_of(engine: Any) -> float:
    with torch.no_grad():
        return float(engine(**inputs(0, 0)).logit_bias)


def train_and_save(run_dir: str, stage: int) -> tuple[float, float, float, str]:
    """The bias at the start, after a step, and in an engine that loaded the checkpoint; an error of one without it."""
    from clap_zero.checkpoint.state import TrainState, load, save
    from clap_zero.checkpoint.store import CheckpointStore
    from clap_zero.distributed.collectives import rank_and_size

    engine = make_engine(stage)
    start = bias_of(engine)
    loss, _ = SIGMOID.share(engine(**inputs(0, rank_and_size()[0])), torch.arange(2))
    engine.backward(loss)
    engine.step()
    state = TrainState(step=1, epoch=0, offset=4, samples=4, world_size=2, stage=stage)
    path = save(engine, CheckpointStore(Path(run_dir) / "checkpoints"), state)
    fresh = make_engine(stage)
    load(fresh, path)
    with pytest.raises(CheckpointError, match="bias of the sigmoid objective learned there, - here") as refused:
        load(make_engine(stage, with_bias=False), path)
    return start, bias_of(engine), bias_of(fresh), str(refused.value)


@pytest.mark.parametrize("stage", [3, *(pytest.param(s, marks=pytest.mark.long) for s in (0, 1, 2))])
def test_the_bias_outlives_the_run(stage: int, tmp_path: Path) -> None:
    run_dir, out = tmp_path / "run", tmp_path / "out"
    (start, trained, resumed, _), _ = run_distributed(train_and_save, 2, str(run_dir), stage, fresh=True)
    assert start == -10 != trained == resumed
    assert trained == pytest.approx(-10, abs=0.02)
    export_run(run_dir, out)
    assert json.loads((out / "config.json").read_text())[CONFIG_KEY] == trained
    _, report = ClapModel.from_pretrained(out, output_loading_info=True)
    assert not any(report.values())
    assert clap_zero.load(out).logit_bias == clap_zero.load(run_dir).logit_bias == trained
    again = build(out, with_bias=True)
    assert again().logit_bias == trained
    # A run with softmax begins without it, and leaves it out of what it writes.
    plain = build(out, with_bias=False)
    assert plain().logit_bias is None and CONFIG_KEY not in plain.config.to_dict()


def test_where_training_starts() -> None:
    model = build(None, with_bias=True)
    assert model().logit_bias == -10 and model().logit_scale.item() == pytest.approx(10)
    plain = build(None, with_bias=False)
    assert plain().logit_scale.item() == pytest.approx(1 / 0.07)
    assert "logit_bias" not in plain.state_dict()
    # Everything else is the same.
    for name, value in plain.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]) or name.startswith("logit_scale"), name


def test_weights_without_a_bias_start_at_the_papers(tmp_path: Path) -> None:
    plain = build(None, with_bias=False)
    plain.config.save_pretrained(tmp_path)
    from safetensors.torch import save_file

    save_file({name: value.contiguous() for name, value in plain.state_dict().items()}, tmp_path / "model.safetensors")
    model = build(tmp_path, with_bias=True)
    assert model().logit_bias == -10
    assert model.logit_scale_a.item() == pytest.approx(math.log(1 / 0.07))
    assert build(tmp_path, with_bias=None).logit_bias is None


@pytest.mark.parametrize("bias", ["low", True, math.nan, -math.inf])
def test_a_bias_that_is_no_number_is_refused(tmp_path: Path, bias: object) -> None:
    """JSON knows true, NaN and Infinity."""
    plain = build(None, with_bias=False)
    plain.config.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"clap_zero_logit_bias": bias}))
    with pytest.raises(CheckpointError, match=f"clap_zero_logit_bias is {bias!r}, not a number"):
        build(tmp_path, with_bias=True)
