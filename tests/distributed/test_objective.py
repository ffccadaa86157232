"""Loss and gradients of the gathered objective over ranks against one process, in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from clap_zero.distributed.collectives import all_gather, rank_and_size
from clap_zero.objective import gathered
from clap_zero.objective.reference import contrastive_loss_reference
from clap_zero.testing import run_distributed

LOCAL = 3


def global_inputs(world: int) -> list[Tensor]:
    """Unnormalised audio and text (B, d) and the scale (), different in every row."""
    random = torch.Generator().manual_seed(world)
    audio, text = (torch.randn(world * LOCAL, 6, generator=random, dtype=torch.float64) for _ in range(2))
    return [audio, text, torch.tensor(14.0, dtype=torch.float64)]


def with_normalised(loss: Callable[..., Tensor], inputs: list[Tensor]) -> Tensor:
    audio, text, scale = inputs
    return loss(F.normalize(audio, dim=-1), F.normalize(text, dim=-1), scale)


def share(factor: float = 1.0) -> tuple[Tensor, list[Tensor]]:
    """This rank's loss, and its gradients with respect to what it put in."""
    rank, world = rank_and_size()
    audio, text, scale = global_inputs(world)
    mine = slice(rank * LOCAL, (rank + 1) * LOCAL)
    inputs = [t.clone().requires_grad_() for t in (audio[mine], text[mine], scale)]
    loss = factor * with_normalised(gathered.contrastive_loss, inputs)
    return loss.detach(), list(torch.autograd.grad(loss, inputs))


def share_without_gradient_in_the_gather() -> tuple[Tensor, list[Tensor]]:
    original = gathered.all_gather_with_gradient
    gathered.all_gather_with_gradient = all_gather
    try:
        return share()
    finally:
        gathered.all_gather_with_gradient = original


def largest_difference(results: list[tuple[Tensor, list[Tensor]]]) -> float:
    """Between what averaging over ranks makes of the shares and the reference: of the loss and of all gradients."""
    world = len(results)
    inputs = [t.requires_grad_() for t in global_inputs(world)]
    reference = with_normalised(contrastive_loss_reference, inputs)
    expected = torch.autograd.grad(reference, inputs)
    audio, text = (torch.cat([gradients[i] for _, gradients in results]) / world for i in (0, 1))
    scale = sum(gradients[2] for _, gradients in results) / world
    loss = sum(loss for loss, _ in results) / world
    pairs = zip((loss, audio, text, scale), (reference, *expected), strict=True)
    return max(float(((a - b).norm() / b.norm()).detach()) for a, b in pairs)


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_equal_one_process(world: int) -> None:
    assert largest_difference(run_distributed(share, world)) < 1e-12


@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_a_planted_factor_is_found(factor: float) -> None:
    assert largest_difference(run_distributed(share, 2, factor)) > 0.4


def test_a_gather_without_gradient_is_found() -> None:
    assert largest_difference(run_distributed(share_without_gradient_in_the_gather, 2)) > 0.1
