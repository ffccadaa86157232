"""Faults of other trainers in the objective, by the names of the list of field faults."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from clap_zero.objective.autograd import contrastive_objective
from clap_zero.objective.config import ObjectiveConfig

GROUPS = torch.arange(32) % 4


def perfect(*, spread: float = 0.0) -> tuple[Tensor, Tensor]:
    """32 clips at the place of their caption, the four captions as far from each other as they can be."""
    random = torch.Generator().manual_seed(0)
    corners = torch.tensor([[1.0, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]], dtype=torch.float64)
    text = F.normalize(corners, dim=1).repeat(8, 1)
    audio = F.normalize(text + spread * torch.randn(32, 3, generator=random, dtype=torch.float64), dim=1)
    return audio.requires_grad_(), text.requires_grad_()


def loss_and_gradients(audio: Tensor, text: Tensor, positives: str) -> tuple[float, Tensor, Tensor]:
    config = ObjectiveConfig(positives=positives)  # type: ignore[arg-type]
    scale = torch.tensor(100.0, dtype=torch.float64)
    loss, _ = contrastive_objective(audio, text, scale, groups=GROUPS, config=config)
    return (loss.item(), *torch.autograd.grad(loss, (audio, text)))


@pytest.mark.parametrize(("positives", "floor"), [("off", math.log(8)), ("mask", 0.0), ("soft", math.log(8))])
def test_c04_a_perfect_model_is_at_the_floor(positives: str, floor: float) -> None:
    """Eight clips share each caption: ln 8 is the entropy of soft targets, and what eight equal captions cost."""
    loss, *gradients = loss_and_gradients(*perfect(), positives)
    assert loss == pytest.approx(floor, abs=1e-12)
    assert all(float(gradient.abs().max()) < 1e-12 for gradient in gradients)


@pytest.mark.parametrize(("positives", "sign"), [("off", -1), ("mask", 0), ("soft", 1)])
def test_c04_only_off_pushes_a_caption_from_its_likes(positives: str, sign: int) -> None:
    """Nearly perfect clips: a step of the captions brings each nearer to the other clips that it describes as well."""
    audio, text = perfect(spread=0.1)
    _, _, gradient = loss_and_gradients(audio, text, positives)
    audio, text = audio.detach(), text.detach()
    moved = F.normalize(text - 1e-3 * gradient, dim=1)
    likes = (GROUPS[:, None] == GROUPS) & ~torch.eye(32, dtype=torch.bool)
    nearer = ((audio @ moved.t()) - (audio @ text.t()))[likes].mean().item()
    assert abs(nearer) < 1e-12 if sign == 0 else sign * nearer > 1e-6
