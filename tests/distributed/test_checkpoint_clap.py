"""The real model: trained on two ranks, saved, exported, and the same as the trainer's masters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import ClapModel

from clap_zero.checkpoint.export import export_run
from clap_zero.testing import run_distributed
from tests.distributed import zero_cases as zc
from tests.unit.checkpoint.small_run import geometry


def make_engine(stage: int, precision: str) -> Any:
    import deepspeed

    from clap_zero.model.clap import build_model

    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "gradient_clipping": 1.0,
    }
    if precision != "fp32":
        settings[precision] = {"enabled": True}
    model = build_model(
        geometry=geometry(fusion=True),
        pretrained=None,
        batch_norm="local",
        dropout=None,
        seed=3,
        ds_config=settings,
        device=torch.device("cpu"),
    )
    return deepspeed.initialize(model=model, config=settings)[0]


def inputs(step: int, rank: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return {
        "input_features": torch.randn(2, 4, 1001, 64, generator=generator) * 20 - 30,
        "is_longer": torch.tensor([[True], [rank == 0]]),
        "input_ids": torch.randint(3, 50_000, (2, 9), generator=generator),
        "attention_mask": torch.ones(2, 9, dtype=torch.int64),
    }


def train(engine: Any, start: int, steps: int) -> list[float]:
    from clap_zero.distributed.collectives import rank_and_size

    losses = []
    for step in range(start, start + steps):
        loss = zc.loss_of(engine(**inputs(step, rank_and_size()[0])))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def train_save_and_resume(run_dir: str, stage: int, precision: str) -> dict[str, Any]:
    from deepspeed.utils import safe_get_full_fp32_param

    from clap_zero.checkpoint.buffers import merged_statistics
    from clap_zero.checkpoint.state import TrainState, load, save
    from clap_zero.checkpoint.store import CheckpointStore

    engine = make_engine(stage, precision)
    train(engine, 0, 2)
    state = TrainState(step=2, epoch=0, offset=8, samples=8, world_size=2, stage=stage)
    path = save(engine, CheckpointStore(Path(run_dir) / "checkpoints"), state)
    random_state = torch.get_rng_state()
    masters = {name: safe_get_full_fp32_param(p).detach().clone() for name, p in engine.module.named_parameters()}
    engine.eval()
    with torch.no_grad(), merged_statistics(engine.module):
        output = engine(**inputs(9, 0))
    engine.train()
    torch.set_rng_state(random_state)
    straight = train(engine, 2, 2)
    fresh = make_engine(stage, precision)
    assert load(fresh, path) == state
    torch.set_rng_state(random_state)  # a run seeds every micro batch anew
    return {
        "masters": masters,
        "audio": output.audio_embeds.clone(),
        "text": output.text_embeds.clone(),
        "losses": (straight, train(fresh, 2, 2)),
    }


@pytest.mark.parametrize(
    "stage, precision",
    [(2, "fp32"), (3, "fp32"), *(pytest.param(s, "bf16", marks=pytest.mark.long) for s in (1, 2, 3))],
)
def test_resume_and_export_of_the_real_model(tmp_path: Path, stage: int, precision: str) -> None:
    results = run_distributed(train_save_and_resume, 2, str(tmp_path / "run"), stage, precision)
    for result in results:
        straight, resumed = result["losses"]
        assert resumed == pytest.approx(straight, rel=1e-6)
    exported = ClapModel.from_pretrained(export_run(tmp_path / "run", tmp_path / "out")).eval()
    parameters = dict(exported.named_parameters())
    assert parameters.keys() == results[0]["masters"].keys()
    for name, master in results[0]["masters"].items():
        assert torch.equal(parameters[name].reshape(master.shape), master), name
    given = inputs(9, 0)
    with torch.no_grad():
        audio = exported.get_audio_features(given["input_features"], is_longer=given["is_longer"]).pooler_output
        text = exported.get_text_features(given["input_ids"], attention_mask=given["attention_mask"]).pooler_output
    tolerance = 1e-5 if precision == "fp32" else 5e-2
    for theirs, ours in ((audio, results[0]["audio"]), (text, results[0]["text"])):
        assert torch.allclose(torch.nn.functional.normalize(theirs, dim=-1), ours, atol=tolerance)
