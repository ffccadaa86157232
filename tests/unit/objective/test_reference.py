"""The definition of the objective, and the gathered form in one process."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from clap_zero.objective.gathered import contrastive_loss
from clap_zero.objective.reference import contrastive_loss_reference


def embeddings(num_pairs: int, width: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(num_pairs)
    audio, text = (torch.randn(num_pairs, width, generator=random, dtype=torch.float64) for _ in range(2))
    return F.normalize(audio, dim=-1), F.normalize(text, dim=-1)


def test_two_pairs_by_hand() -> None:
    """Clip 0 is as close to caption 0 as to caption 1, clip 1 only to caption 1."""
    half = math.sqrt(0.5)
    audio = torch.tensor([[half, half], [0.0, 1.0]], dtype=torch.float64)
    text = torch.eye(2, dtype=torch.float64)
    scale = torch.tensor(2.0, dtype=torch.float64)

    def row(right: float, wrong: float) -> float:
        return -2 * right + math.log(math.exp(2 * right) + math.exp(2 * wrong))

    expected = (row(half, half) + row(1, 0) + row(half, 0) + row(1, half)) / 4
    assert contrastive_loss_reference(audio, text, scale).item() == pytest.approx(expected, rel=1e-12)


def test_equal_embeddings_give_the_logarithm_of_the_batch() -> None:
    same = F.normalize(torch.ones(6, 3, dtype=torch.float64), dim=-1)
    loss = contrastive_loss_reference(same, same, torch.tensor(100.0, dtype=torch.float64))
    assert loss.item() == pytest.approx(math.log(6), rel=1e-12)


@pytest.mark.parametrize("num_pairs", [1, 2, 7])
def test_gathered_is_the_reference_in_one_process(num_pairs: int) -> None:
    inputs = [t.requires_grad_() for t in (*embeddings(num_pairs), torch.tensor(14.3, dtype=torch.float64))]
    ours, reference = contrastive_loss(*inputs), contrastive_loss_reference(*inputs)
    torch.testing.assert_close(ours, reference, rtol=1e-12, atol=1e-12)
    for a, b in zip(torch.autograd.grad(ours, inputs), torch.autograd.grad(reference, inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("loss", [contrastive_loss, contrastive_loss_reference])
def test_gradcheck(loss) -> None:
    inputs = [t.requires_grad_() for t in (*embeddings(4), torch.tensor(3.0, dtype=torch.float64))]
    assert torch.autograd.gradcheck(loss, inputs)


def test_the_directions_differ() -> None:
    """ClapModel's own loss computes one direction twice; ours must change when the other direction does."""
    audio, text = embeddings(5)
    scale = torch.tensor(10.0, dtype=torch.float64)
    labels = torch.arange(5)
    one_direction = F.cross_entropy(scale * text @ audio.t(), labels)
    both = (one_direction + F.cross_entropy(scale * audio @ text.t(), labels)) / 2
    assert contrastive_loss(audio, text, scale).item() == pytest.approx(both.item(), rel=1e-12)
    assert abs(both - one_direction) > 1e-3
