"""Held-out figures do not depend on the number of ranks, and evaluation leaves the model as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from clap_zero.errors import DivergedError
from clap_zero.testing import run_distributed
from tests.unit.checkpoint.small_run import make_model, make_shards

NUM_CLIPS = 7


def evaluate_on_ranks(shards: str, stage: int | None, drift: float = 0.0, poison: bool = False) -> dict[str, Any]:
    from clap_zero.audio.features import ClapFeatures
    from clap_zero.data.batch import LoaderPlan
    from clap_zero.data.index import load_index
    from clap_zero.data.loader import eval_batches
    from clap_zero.distributed.collectives import rank_and_size
    from clap_zero.evaluation.runner import evaluate
    from clap_zero.model.clap import feature_config

    rank, world_size = rank_and_size()
    device = torch.device("cpu")
    model: Any = make_model(fusion=False)
    config = feature_config(model.config)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):  # statistics around the same mean, as local BatchNorm leaves them
                buffer.add_(drift * (rank - (world_size - 1) / 2))
        if poison and rank == world_size - 1:
            model.audio_projection.linear2.bias[0] = torch.nan
    before = {name: value.clone() for name, value in model.named_buffers()}
    forward: Any = model
    if stage is not None:
        import deepspeed

        optimizer = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
        zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
        settings = {"train_micro_batch_size_per_gpu": 2, "optimizer": optimizer, "zero_optimization": zero}
        forward, *_ = deepspeed.initialize(model=model, config=settings)
    model.train()
    model.audio_model.audio_encoder.batch_norm.eval()
    plan = LoaderPlan(rank=rank, world_size=world_size, micro_batch=2, features=config)
    batches = eval_batches(load_index([shards]), plan=plan)
    result = evaluate(forward, batches, ClapFeatures(config, device=device), device=device)
    modes = {part.training for part in model.modules()}
    assert modes == {True, False} and not model.audio_model.audio_encoder.batch_norm.training
    for name, value in model.named_buffers():
        assert torch.equal(value, before[name]), name
    return {"metrics": result.metrics, "counts": (result.num_clips, result.num_captions, result.num_skipped)}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_shards(tmp_path_factory.mktemp("shards") / "val", num_clips=NUM_CLIPS, captions=3))


def test_seven_clips_on_one_two_and_three_ranks(shards: str) -> None:
    outcomes = [result for world in (1, 2, 3) for result in run_distributed(evaluate_on_ranks, world, shards, None)]
    assert all(outcome["counts"] == (NUM_CLIPS, 3 * NUM_CLIPS, 0) for outcome in outcomes)
    assert all(outcome["metrics"] == outcomes[0]["metrics"] for outcome in outcomes)
    assert 0 < outcomes[0]["metrics"]["audio_to_text.median_rank"] < 3 * NUM_CLIPS


def test_works_at_zero_3_and_ranks_with_statistics_of_their_own_count_as_one_model(shards: str) -> None:
    reference = run_distributed(evaluate_on_ranks, 1, shards, None)[0]
    for result in run_distributed(evaluate_on_ranks, 2, shards, 3, 1e-4):
        assert result["counts"] == reference["counts"]
        assert result["metrics"] == pytest.approx(reference["metrics"])


def test_a_diverged_rank_is_an_error_on_all_ranks(shards: str) -> None:
    with pytest.raises(DivergedError, match="embeddings are not finite"):
        run_distributed(evaluate_on_ranks, 2, shards, None, 0.0, True)


def merge(own: float) -> dict[str, torch.Tensor]:
    from clap_zero.checkpoint.buffers import merge_over_ranks
    from clap_zero.distributed.collectives import rank_and_size

    rank, _ = rank_and_size()
    generator = torch.Generator().manual_seed(rank)
    samples = torch.randn(4000, 3, generator=generator, dtype=torch.float64) * (1 + rank) + own * rank
    buffers = {
        "norm.running_mean": samples.mean(0).float(),
        "norm.running_var": samples.var(0, correction=0).float(),
        "norm.num_batches_tracked": torch.tensor(5 + rank),
        "index": torch.arange(3),
    }
    merged = merge_over_ranks(buffers)
    equal = merge_over_ranks({"a.running_mean": torch.tensor([0.1, 0.3]), "a.running_var": torch.tensor([0.7, 1e-8])})
    return {"samples": samples, **merged, **{f"equal.{name}": value for name, value in equal.items()}}


def test_merged_statistics_are_those_of_all_samples() -> None:
    """Mean and variance of the ranks' samples put together: the variance between ranks belongs to it."""
    results = run_distributed(merge, 3, 2.5)
    every = torch.cat([result["samples"] for result in results])
    for result in results:
        assert torch.allclose(result["norm.running_mean"].double(), every.mean(0), rtol=1e-6)
        assert torch.allclose(result["norm.running_var"].double(), every.var(0, correction=0), rtol=1e-6)
        assert result["norm.num_batches_tracked"] == 7
        assert torch.equal(result["equal.a.running_mean"], torch.tensor([0.1, 0.3]))
        assert torch.equal(result["equal.a.running_var"], torch.tensor([0.7, 1e-8]))
