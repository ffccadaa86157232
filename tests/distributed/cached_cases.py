"""Shared by the tests of global batches out of micro batches: the trainer's own passes and engine on the small CLAP."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from clap_zero.config.objective import needs_caching
from clap_zero.distributed.collectives import rank_and_size
from clap_zero.distributed.world import World
from clap_zero.model.activation import enable_activation_checkpointing
from clap_zero.model.clap import ContrastOutput, Parts
from clap_zero.objective.config import ObjectiveConfig
from clap_zero.training.engine import Engine
from clap_zero.training.objective import RunObjective
from clap_zero.training.passes import CachedPasses, Forward, Inputs, MicroPasses
from tests.distributed import zero_cases as zc

LOCAL = 4


OFF = ObjectiveConfig(positives="off")


@dataclass(frozen=True)
class Case:
    """One way to take global batches.

    Attributes:
        weights: Directory of the initial weights, None for those of the seed; with LAION's heads they are trained.
        stage: ZeRO stage.
        world: Ranks; 0 stands for one process without DeepSpeed.
        accumulation: Micro batches of a step.
        local: Pairs of a rank's micro batch.
        fused: Whether the model has feature fusion.
        batch_norm: local, sync or frozen.
        negatives: global, micro or local.
        config: The objective.
        precision: fp32, bf16 or fp16.
        dropout: Of both towers.
        checkpointing: Whether activations are recomputed.
        steps: Optimizer steps.
        clipping: Largest norm of the gradient, 0 without.
        zero: More keys of zero_optimization.
        factor: Planted into the gradients of the cached embeddings.
        weight_decay: Of what decays; the logit scales and the bias do not.
        scale_power: Of two, the loss scale with which fp16 begins.
    """

    weights: Path | None
    stage: int = 2
    world: int = 2
    accumulation: int = 3
    local: int = LOCAL
    fused: bool = True
    batch_norm: str = "sync"
    negatives: str = "global"
    config: ObjectiveConfig = OFF
    precision: str = "fp32"
    dropout: float = 0.0
    checkpointing: bool = False
    steps: int = 1
    clipping: float = 0.0
    zero: dict[str, Any] = field(default_factory=dict)
    factor: float = 1.0
    weight_decay: float = 0.0
    scale_power: int = 6

    @property
    def num_pairs(self) -> int:
        return self.local * self.world * self.accumulation

    @property
    def parts(self) -> Parts:
        return Parts(bias=self.config.uses_bias, mlp="auto")

    def pairs(self, step: int) -> zc.Pairs:
        """The global batch of a step: other shares of long clips in every micro batch and on every rank."""
        num_blocks, shares = self.world * self.accumulation, (0, 3, 1, 4, 2)
        if self.batch_norm == "local":
            # A single long clip takes running statistics, of which every rank has its own.
            shares = (0, 3, 2, 4, 2)
        long_rows = [b * self.local + row for b in range(num_blocks) for row in range(min(self.local, shares[b % 5]))]
        return zc.make_pairs(
            self.num_pairs, fused=self.fused, long_rows=tuple(long_rows) if self.fused else (), seed=9 + step
        )

    def groups(self) -> Tensor:
        """Pair 1 and the last one, and pair 2 and the one after it, share a caption."""
        groups = torch.arange(self.num_pairs)
        groups[-1], groups[3] = groups[1], groups[2]
        return groups

    def micro_batch(self, step: int, micro_index: int, rank: int) -> Inputs:
        """The part of a rank."""
        first = (micro_index * self.world + rank) * self.local
        rows = slice(first, first + self.local)
        return Inputs(*self.pairs(step).rows(rows.start, rows.stop), groups=self.groups()[rows])


@dataclass
class Outcome:
    """What a rank, or the one process, ends with.

    Attributes:
        losses: Of each step; a rank's share.
        gradients: Of the first step, by name: later ones begin at other weights, by rounding.
        parameters: fp32 masters after the last step, by name.
        statistics: BatchNorm's buffers after the last step.
        statistics_of_ranks: Of the one process: those of each rank under `local`, else one for all.
        norms: Of the gradient before clipping.
        embeds: Outputs of every forward.
        counted: Steps that DeepSpeed counted.
        updated: Of every step whether the weights moved.
        loss_scales: After every step; None without fp16.
        scales: Of every step as the forward used them; two with LAION's heads.
    """

    losses: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    statistics: dict[str, Tensor] = field(default_factory=dict)
    statistics_of_ranks: list[dict[str, Tensor]] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    embeds: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    counted: int = 0
    updated: list[bool] = field(default_factory=list)
    loss_scales: list[float | None] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)


class _Engine(Engine):
    """Keeps the whole gradients that it is about to step with."""

    gradients: dict[str, Tensor]

    def step(self) -> bool:
        from deepspeed.utils import safe_get_full_grad

        if self.deepspeed.is_gradient_accumulation_boundary():
            found = ((name, safe_get_full_grad(p)) for name, p in self.module.named_parameters())
            scale = self.loss_scale or 1.0
            self.gradients = {name: grad.detach().float() / scale for name, grad in found if grad is not None}
        return super().step()


class _Forward(Forward):
    """Takes `Inputs` as they are, and remembers what came out."""

    def __init__(self, engine: Engine, *, world: World) -> None:
        super().__init__(engine, features=None, seed=0, world=world)  # type: ignore[arg-type]
        self.embeds: list[tuple[Tensor, Tensor]] = []

    def inputs(self, batch: Any) -> Inputs:
        return batch

    def embed(self, inputs: Inputs, *, step: int, micro_index: int) -> ContrastOutput:
        output = super().embed(inputs, step=step, micro_index=micro_index)
        assert output.audio_embeds is not None and output.text_embeds is not None
        self.embeds.append((output.audio_embeds.detach().clone(), output.text_embeds.detach().clone()))
        return output


@dataclass(frozen=True)
class _Planted(RunObjective):
    """An objective whose gradients are off by a factor."""

    factor: float = 1.0

    def gradients(self, output: ContrastOutput, groups: Tensor) -> Any:
        loss, gradients, figures = super().gradients(output, groups)
        wrong = ContrastOutput(*(None if g is None else self.factor * g for g in gradients))  # type: ignore[arg-type]
        return loss, wrong, figures


def resolved(case: Case) -> dict[str, Any]:
    """The DeepSpeed JSON of a case."""
    config = zc.ds_config(case.stage, micro_batch=case.local, world=case.world, precision=case.precision, **case.zero)
    config["gradient_accumulation_steps"] = case.accumulation
    config["train_batch_size"] = case.num_pairs
    config["gradient_clipping"] = case.clipping
    # With 1e-8 a gradient that is zero but for rounding moves its parameter by a whole learning rate either way.
    config["optimizer"]["params"] |= {"eps": 1e-4, "weight_decay": case.weight_decay}
    config["fp16"]["initial_scale_power"] = case.scale_power
    if case.precision == "bf16" and case.stage:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
        config["communication_data_type"] = "fp32"
    if "offload_optimizer" in case.zero:
        config["zero_force_ds_cpu_optimizer"] = False
    if case.checkpointing:
        config["activation_checkpointing"] = {}
    return config


def on_a_rank(case: Case) -> Outcome:
    """Steps as the trainer takes them. Collective: all ranks must call."""
    from deepspeed.utils import safe_get_full_fp32_param

    if case.precision == "fp16":
        from deepspeed.accelerator import get_accelerator

        # DeepSpeed refuses fp16 on CPUs without units for it; torch computes it all the same, slowly.
        get_accelerator().is_fp16_supported = lambda: True
    rank, size = rank_and_size()
    assert size == case.world
    world = World(rank, size, rank, size, zc.CPU)
    config = resolved(case)
    model = zc.build(
        config,
        fused=case.fused,
        weights=case.weights,
        batch_norm=case.batch_norm,
        dropout=case.dropout,
        parts=case.parts,
    )
    enable_activation_checkpointing(model, config)
    settings: Any = SimpleNamespace(config=config, stage=case.stage, precision=case.precision)
    engine = _Engine(model, resolved=settings, world=world)
    forward = _Forward(engine, world=world)
    objective = _Planted(case.config, case.negatives != "local", case.factor)
    kind = CachedPasses if needs_caching(case.negatives, accumulation=case.accumulation) else MicroPasses
    passes, outcome = kind(forward, objective=objective), Outcome()
    for step in range(1, case.steps + 1):
        batches: Any = iter([case.micro_batch(step, index, rank) for index in range(case.accumulation)])
        passed = passes.run(batches, step=step)
        outcome.losses.append(float(passed.loss))
        outcome.scales += [float(s) for s in (passed.logit_scale, passed.logit_scale_t) if s is not None]
        outcome.norms.append(engine.grad_norm)
        outcome.updated.append(passed.updated)
        outcome.loss_scales.append(engine.loss_scale)
        outcome.gradients = outcome.gradients or engine.gradients
    outcome.embeds = forward.embeds
    for name, parameter in engine.module.named_parameters():
        master = safe_get_full_fp32_param(parameter)  # at stage 0 DeepSpeed shows none
        master = parameter if master is None else master
        outcome.parameters[name] = master.detach().clone()
    outcome.statistics = statistics(engine.module)
    outcome.counted = engine.deepspeed.global_steps
    zc.finish(engine.deepspeed)
    return outcome


def statistics(model: torch.nn.Module) -> dict[str, Tensor]:
    """Copies of BatchNorm's buffers, by name."""
    return {n: b.clone() for n, b in model.named_buffers() if "running" in n or "num_batches" in n}
