"""Activation checkpointing: the same losses and gradients as without, and the JSON's wishes kept or refused."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from clap_zero.distributed.collectives import rank_and_size
from clap_zero.model.activation import CheckpointedAudioLayer, enable_activation_checkpointing
from clap_zero.testing import run_distributed
from tests.distributed import zero_cases as zc

LOCAL = 4


def train(stage: int, section: dict[str, Any] | None, precision: str) -> tuple[list[float], dict[str, Tensor], int]:
    """Three steps with dropout and drop path; losses, gradients of the last, and how often the text layers ran."""
    from deepspeed.utils import safe_get_full_grad

    rank, world = rank_and_size()
    config = zc.ds_config(stage, micro_batch=LOCAL, world=world, precision=precision)
    if section is not None:
        config["activation_checkpointing"] = section
    model = zc.build(config, fused=True, dropout=0.3)
    assert enable_activation_checkpointing(model, config) == (section is not None)
    engine = zc.initialise(model, config)
    runs = 0

    def count(*_: object) -> None:
        nonlocal runs
        runs += 1

    model.text_model.encoder.layer[0].attention.register_forward_hook(count)
    model.audio_model.audio_encoder.layers[0].blocks[0].attention.register_forward_hook(count)
    losses = []
    for step in range(3):
        torch.manual_seed(10 * step + rank)
        pairs = zc.make_pairs(LOCAL * world, fused=True, long_rows=(0, 1), seed=step)
        loss = zc.loss_of(engine(**pairs.rows(LOCAL * rank, LOCAL * (rank + 1))._asdict()))
        engine.backward(loss)
        if step == 2:
            gradients = {n: safe_get_full_grad(p).detach().clone() for n, p in engine.module.named_parameters()}
        engine.step()
        losses.append(loss.item())
    zc.finish(engine)
    return losses, gradients, runs


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (2, "fp32"), (3, "fp32"), (3, "bf16")])
def test_losses_and_gradients_are_those_without(stage: int, precision: str) -> None:
    plain = run_distributed(train, 2, stage, None, precision)
    checkpointed = run_distributed(train, 2, stage, {}, precision)
    for (losses, gradients, runs), (expected_losses, expected, expected_runs) in zip(checkpointed, plain, strict=True):
        assert (expected_runs, runs) == (6, 12)
        assert losses == pytest.approx(expected_losses, rel=1e-6)
        for name, gradient in gradients.items():
            # Against the whole tensor: sums round by where tensors lie in memory, and two steps of Adam add to that.
            assert (gradient - expected[name]).norm() <= 1e-4 * expected[name].norm() + 1e-6, name


def test_other_keys_reach_deepspeed() -> None:
    section = {"partition_activations": True, "number_checkpoints": 4, "synchronize_checkpoint_boundary": True}
    losses, _, _ = run_distributed(train, 1, 2, section, "fp32")[0]
    expected, _, _ = run_distributed(train, 1, 2, None, "fp32")[0]
    assert losses == pytest.approx(expected, rel=1e-6)
    assert run_distributed(configured, 1, section) == [(True, 4, True)]


def configured(section: dict[str, Any]) -> tuple[bool, int | None, bool]:
    from deepspeed.runtime.activation_checkpointing import checkpointing

    model = zc.build({}, fused=False)
    enable_activation_checkpointing(model, {"activation_checkpointing": section})
    assert any(isinstance(m, CheckpointedAudioLayer) for m in model.modules())
    return checkpointing.PARTITION_ACTIVATIONS, checkpointing.num_layers, checkpointing.SYNCHRONIZE


def test_without_the_section_nothing_changes() -> None:
    model = zc.build({}, fused=False)
    assert not enable_activation_checkpointing(model, {})
    assert not any(isinstance(m, CheckpointedAudioLayer) for m in model.modules())


def calls_by_mode() -> dict[str, int]:
    """How often DeepSpeed's function is called in a forward of each kind."""
    import deepspeed

    model = zc.build({}, fused=False)
    enable_activation_checkpointing(model, {"activation_checkpointing": {}})
    pairs = zc.make_pairs(2, fused=False)._asdict()
    calls = {}
    original = deepspeed.checkpointing.checkpoint
    for mode in ("training", "no_grad", "evaluation"):
        with mock.patch.object(deepspeed.checkpointing, "checkpoint", side_effect=original) as counted:
            model.train(mode != "evaluation")
            with torch.set_grad_enabled(mode != "no_grad"):
                model(**pairs)
            calls[mode] = counted.call_count
    return calls


def test_only_training_is_checkpointed() -> None:
    geometry = zc.tiny_geometry(fused=False)
    blocks = sum(geometry["audio_config"]["depths"]) + geometry["text_config"]["num_hidden_layers"]
    assert run_distributed(calls_by_mode, 1) == [{"training": blocks, "no_grad": 0, "evaluation": 0}]
