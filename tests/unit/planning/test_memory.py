"""The memory of a rank: ZeRO's published figures, what offloading moves, and that the parts follow the settings."""

from __future__ import annotations

from typing import Any

import pytest

from clap_zero.config.deepspeed import Machine, resolve
from clap_zero.config.load import parse_command_line
from clap_zero.config.preset import load_preset
from clap_zero.config.schema import PRESETS
from clap_zero.planning.memory import MemoryEstimate, estimate_memory, model_states, told_accuracy

CUDA = Machine(memory_bytes=0, num_samples=600_000, device_type="cuda")


def estimate(ds: dict[str, Any], *argv: str, world: int = 8, preset: str = "htsat-fused") -> MemoryEstimate:
    command = parse_command_line(["--ds_config", "x.json", "--model.preset", preset, *argv], has_gpu=True)
    resolved = resolve(ds, command.run, world_size=world, machine=CUDA, explicit=command.explicit)
    return estimate_memory(resolved, preset=load_preset(preset), world_size=world, device_type="cuda")


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_figures_of_the_zero_paper(stage: int, gigabytes: float) -> None:
    """Figure 1 there: 7.5 B parameters, mixed precision, Adam, 64 ranks."""
    states = model_states(7_500_000_000, stage=stage, world_size=64, weight_bytes=2, gradient_bytes=2)
    assert states.total / 1e9 == pytest.approx(gigabytes, abs=0.05)


def test_what_is_not_partitioned_is_whole_on_each_rank() -> None:
    one = model_states(1000, stage=3, world_size=1, weight_bytes=4, gradient_bytes=4)
    assert (one.weights, one.gradients, one.optimizer) == (4000, 4000, 12000)
    plain = model_states(1000, stage=0, world_size=8, weight_bytes=4, gradient_bytes=4)
    assert plain.optimizer == 8000, "fp32 without ZeRO has no second copy"
    sgd = model_states(1000, stage=1, world_size=3, weight_bytes=2, gradient_bytes=4, num_states=1)
    assert sgd.optimizer == 2667, "the largest part counts"


@pytest.mark.parametrize("preset", PRESETS)
def test_each_stage_needs_less(preset: str) -> None:
    bf16 = {"bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 4}
    parts = [estimate({**bf16, "zero_optimization": {"stage": stage}}, preset=preset).device for stage in range(4)]
    totals = [part["weights"] + part["gradients"] + part["optimizer"] for part in parts]
    assert totals == sorted(totals, reverse=True)
    assert len({part["activations"] for part in parts}) == 1
    assert parts[0]["optimizer"] == 12 * load_preset(preset).num_parameters


def test_offloading_moves_what_it_names() -> None:
    base = {"bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 16}
    stay = estimate({**base, "zero_optimization": {"stage": 3}})
    cpu = {"device": "cpu"}
    moved = estimate({**base, "zero_optimization": {"stage": 3, "offload_optimizer": cpu, "offload_param": cpu}})
    assert moved.host["optimizer"] == stay.device["optimizer"]
    assert moved.host["weights"] == stay.device["weights"]
    assert moved.device["optimizer"] == moved.device["weights"] == 0
    assert "gradients" not in moved.device
    half = estimate({**base, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}})
    assert half.host["optimizer"] == pytest.approx(stay.device["optimizer"] / 2, abs=1)
    nvme = {"device": "nvme", "nvme_path": "/nvme"}
    assert estimate({**base, "zero_optimization": {"stage": 3, "offload_optimizer": nvme}}).disk["optimizer"] > 0


def test_parts_follow_their_settings() -> None:
    ds: dict[str, Any] = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2, "reduce_bucket_size": 1_000_000}}
    small = estimate({**ds, "train_micro_batch_size_per_gpu": 8})
    assert small.device["buffers"] == 4_000_000, "gradients travel as fp32"
    large = estimate({**ds, "train_micro_batch_size_per_gpu": 32})
    assert large.device["activations"] == pytest.approx(4 * small.device["activations"], abs=4)
    assert large.device["contrast"] > small.device["contrast"]
    saved = estimate({**ds, "train_micro_batch_size_per_gpu": 32, "activation_checkpointing": {}})
    assert saved.device["activations"] < large.device["activations"] / 2
    local = estimate({**ds, "train_micro_batch_size_per_gpu": 32}, "--objective.negatives", "local")
    assert local.device["contrast"] < large.device["contrast"]
    assert estimate({"train_micro_batch_size_per_gpu": 8}, world=1).device["buffers"] == 0


@pytest.mark.parametrize(("stage", "num_buckets"), [(1, 2), (2, 2), (3, 1)])
def test_two_buckets_overlap_below_stage_3(stage: int, num_buckets: int) -> None:
    zero = {"stage": stage, "overlap_comm": True, "reduce_bucket_size": 1_000_000}
    got = estimate({"bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 8, "zero_optimization": zero})
    gathered = 2 * load_preset("htsat-fused").num_parameters if stage == 3 else 0
    assert got.device["buffers"] == num_buckets * 4_000_000 + gathered


@pytest.mark.parametrize(
    ("zero", "device", "text"),
    [
        ({"stage": 2}, "cpu", "1 to 17 % off"),
        ({"stage": 2}, "cuda", "not measured for GPUs"),
        ({"stage": 3}, "cpu", "not measured for stage 3"),
        ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, "cpu", "not measured for offloading"),
    ],
)
def test_the_accuracy_is_told_only_where_it_was_measured(zero: dict[str, Any], device: str, text: str) -> None:
    command = parse_command_line(["--ds_config", "x.json"])
    resolved = resolve({"zero_optimization": zero}, command.run, world_size=1, machine=CUDA)
    assert text in told_accuracy(resolved, device_type=device)


def test_a_checkpoint_does_not_depend_on_the_ranks() -> None:
    ds: dict[str, Any] = {"bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 4}
    count = load_preset("htsat-fused").num_parameters
    for stage, size in ((1, 18), (2, 18), (3, 16)):
        for world in (1, 7, 64):
            got = estimate({**ds, "zero_optimization": {"stage": stage}}, world=world).checkpoint
            assert got == pytest.approx(size * count, rel=1e-6)


def test_the_sum_is_near_what_was_measured() -> None:
    """docs/configuration.md has the command: two steps of 32 pairs with ds_configs/zero2.json, one CPU rank."""
    command = parse_command_line(["--ds_config", "x.json", "--model.preset", "tiny"])
    ds = {
        "bf16": {"enabled": True},
        "train_micro_batch_size_per_gpu": 32,
        "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 50_000_000},
        "activation_checkpointing": {},
    }
    cpu = Machine(memory_bytes=0, num_samples=500, device_type="cpu")
    resolved = resolve(ds, command.run, world_size=1, machine=cpu)
    got = estimate_memory(resolved, preset=load_preset("tiny"), world_size=1, device_type="cpu")
    assert got.device_bytes == pytest.approx(1_416_155_136, rel=0.03)
    assert got.checkpoint == pytest.approx(136_681_149, rel=0.02)
