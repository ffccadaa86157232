"""Synchronised BatchNorm over ranks against one process with the whole micro batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from clap_zero.distributed.collectives import rank_and_size
from clap_zero.model.batch_norm import replace_batch_norm
from clap_zero.testing import run_distributed

LOCAL = 4


def module() -> nn.Module:
    norm = nn.BatchNorm2d(3)
    random = torch.Generator().manual_seed(1)
    for t in (*norm.parameters(), norm.running_mean, norm.running_var):
        t.data = torch.rand(t.shape, generator=random) + 0.5
    replace_batch_norm(norm, policy="sync")
    return norm


def whole_batch(world: int, *, pooled: bool) -> tuple[Tensor, Tensor]:
    """x (B, 3, h, w) whose ranks have very different levels, and the weighting of the output."""
    random = torch.Generator().manual_seed(2)
    size = (1, 1) if pooled else (5, 2)
    x = torch.randn(world * LOCAL, 3, *size, generator=random)
    level = torch.arange(world).repeat_interleave(LOCAL).view(-1, 1, 1, 1) * 40.0
    return x + level, torch.randn(x.shape, generator=random)


def step(norm: nn.Module, x: Tensor, weights: Tensor, valid: Tensor) -> list[Tensor]:
    """Output, gradients of x, weight and bias, and buffers, two batches long."""
    x = x.clone().requires_grad_()
    norm(x + 1, valid)
    y = norm(x, valid)
    gradients = torch.autograd.grad((y * weights).sum(), [x, norm.weight, norm.bias])
    return [y.detach(), *gradients, *norm.buffers()]


def on_a_rank(pooled: bool, valid: list[bool]) -> list[Tensor]:
    rank, world = rank_and_size()
    mine = slice(rank * LOCAL, (rank + 1) * LOCAL)
    x, weights = whole_batch(world, pooled=pooled)
    return step(module(), x[mine], weights[mine], torch.tensor(valid)[mine])


MASKS = {
    "all": [True] * 8,
    "unequal": [True, False, False, False, True, True, True, False],
    "none on one rank": [False] * 4 + [True, True, False, True],
    "two in all": [True, False, False, False, False, False, True, False],
}


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("mask", MASKS)
def test_two_ranks_equal_one_process(mask: str, pooled: bool) -> None:
    valid = MASKS[mask]
    results = run_distributed(on_a_rank, 2, pooled, valid)
    x, weights = whole_batch(2, pooled=pooled)
    y, x_gradient, weight_gradient, bias_gradient, *buffers = step(module(), x, weights, torch.tensor(valid))
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(torch.cat([r[0] for r in results]), y, **close)
    torch.testing.assert_close(torch.cat([r[1] for r in results]), x_gradient, **close)
    # The parameters' gradients are each rank's own; the engine adds them up.
    torch.testing.assert_close(results[0][2] + results[1][2], weight_gradient, **close)
    torch.testing.assert_close(results[0][3] + results[1][3], bias_gradient, **close)
    for result in results:
        for ours, expected in zip(result[4:], buffers, strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("valid", [[False] * 8, [False] * 7 + [True]], ids=["no value", "one value per channel"])
def test_too_few_values_leave_the_statistics(valid: list[bool]) -> None:
    before = list(module().buffers())
    for result in run_distributed(on_a_rank, 2, True, valid):
        assert all(torch.isfinite(t).all() for t in result)
        for ours, expected in zip(result[4:], before, strict=True):
            assert torch.equal(ours, expected)


def test_four_ranks() -> None:
    valid = [True] * 16
    results = run_distributed(on_a_rank, 4, False, valid)
    x, weights = whole_batch(4, pooled=False)
    y, x_gradient, *_ = step(module(), x, weights, torch.tensor(valid))
    torch.testing.assert_close(torch.cat([r[0] for r in results]), y, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.cat([r[1] for r in results]), x_gradient, rtol=1e-5, atol=1e-5)
