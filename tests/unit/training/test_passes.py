"""Cached and plain passes on a small model without DeepSpeed: what is drawn, seeded, sent back and left behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clap_zero.distributed.world import World
from clap_zero.model.clap import ContrastOutput
from clap_zero.training.objective import joined
from clap_zero.training.passes import CachedPasses, Forward, Inputs, MicroPasses
from tests.unit.training.plain_engine import PLAIN, PlainEngine, Ready

SIZES = (3, 2, 4)


class Model(nn.Module):
    """Two towers with dropout and BatchNorm on rows of 6 numbers and 6 tokens."""

    def __init__(self, *, dropout: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.audio = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, momentum=0.5), nn.Dropout(dropout))
        self.text = nn.Linear(6, 8)
        self.raw_scale = nn.Parameter(torch.tensor(2.0))
        self.fails_at: int | None = None
        self.calls = 0

    def forward(self, input_features: Tensor, input_ids: Tensor, **_: Tensor) -> ContrastOutput:
        self.calls += 1
        if self.calls == self.fails_at:
            raise RuntimeError("planted")
        embeds = self.audio(input_features), self.text(input_ids)
        return ContrastOutput(*(F.normalize(t, dim=1) for t in embeds), self.raw_scale.exp())


def parts() -> list[Inputs]:
    random = torch.Generator().manual_seed(1)
    rows = [torch.randn(9, 6, generator=random).split(SIZES) for _ in range(2)]
    groups = torch.arange(9).split(SIZES)
    return [Inputs(a, a, t, t, g) for a, t, g in zip(*rows, groups, strict=True)]


def passes(kind: Any, model: Model) -> tuple[Any, PlainEngine, Forward]:
    engine = PlainEngine(model, accumulation=len(SIZES))
    forward = Ready(engine, world=World(0, 1, 0, 1, torch.device("cpu")))
    return kind(forward, objective=PLAIN), engine, forward


def buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.named_buffers()}


def whole(model: Model) -> tuple[Tensor, list[Tensor]]:
    """One graph over all micro batches, seeded as the passes are."""
    _, _, forward = passes(CachedPasses, model)
    outputs = [forward.embed(inputs, step=3, micro_index=index) for index, inputs in enumerate(parts())]
    loss, _ = PLAIN.share(joined(outputs), torch.arange(9))
    return loss.detach(), list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.fixture
def model() -> Iterator[Model]:
    with torch.random.fork_rng():
        yield Model(dropout=0.3)


def test_cached_passes_are_one_graph_over_uneven_micro_batches(model: Model) -> None:
    loss, gradients = whole(model)
    for name, value in buffers(Model(dropout=0.3)).items():
        model.get_buffer(name).copy_(value)
    cached, engine, _ = passes(CachedPasses, model)
    result = cached.run(iter(parts()), step=3)
    assert result.loss == pytest.approx(loss.item(), rel=1e-6)
    assert result.updated and engine.divided == [False] * 3
    for parameter, right in zip(model.parameters(), gradients, strict=True):
        if right.abs().max() > 1e-6:  # a bias before BatchNorm has none but rounding
            torch.testing.assert_close(parameter.grad, right, rtol=1e-4, atol=1e-6)


def test_each_micro_batch_is_embedded_as_soon_as_it_is_drawn(model: Model) -> None:
    """The loader then prepares the next ones while the model computes."""
    calls = []

    def drawing() -> Iterator[Inputs]:
        for inputs in parts():
            calls.append(model.calls)
            yield inputs

    passes(CachedPasses, model)[0].run(drawing(), step=3)
    assert calls == [0, 1, 2] and model.calls == 6


def test_statistics_move_as_in_one_pass(model: Model) -> None:
    start = buffers(model)
    passes(MicroPasses, model)[0].run(iter(parts()), step=3)
    once = buffers(model)
    for name, value in start.items():
        model.get_buffer(name).copy_(value)
    passes(CachedPasses, model)[0].run(iter(parts()), step=3)
    moved = buffers(model)
    assert all(torch.equal(moved[name], value) for name, value in once.items())
    assert not torch.equal(moved["audio.1.running_mean"], start["audio.1.running_mean"])


def test_statistics_are_taken_back_when_the_first_pass_fails(model: Model) -> None:
    start = buffers(model)
    model.fails_at = 3
    with pytest.raises(RuntimeError, match="planted"):
        passes(CachedPasses, model)[0].run(iter(parts()), step=3)
    assert all(torch.equal(value, start[name]) for name, value in buffers(model).items())


def test_plain_passes_take_a_loss_for_each_micro_batch(model: Model) -> None:
    plain, engine, forward = passes(MicroPasses, model)
    start = buffers(model)
    result = plain.run(iter(parts()), step=3)
    for name, value in start.items():
        model.get_buffer(name).copy_(value)
    alone = [
        PLAIN.share(forward.embed(inputs, step=3, micro_index=index), inputs.groups)[0].item()
        for index, inputs in enumerate(parts())
    ]
    assert result.loss == pytest.approx(sum(alone) / 3, rel=1e-6)
    assert engine.divided == [True] * 3
