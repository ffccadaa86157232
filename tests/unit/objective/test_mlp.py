"""LAION's two losses against four cross-entropies."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from clap_zero.objective.config import ObjectiveConfig
from clap_zero.objective.mlp import TwoHeads, mlp_gradients, mlp_objective
from tests.unit.objective.cases import largest_error

NAMES = ("audio", "text", "audio_mlp", "text_mlp", "logit_scale_a", "logit_scale_t")


def heads() -> TwoHeads:
    random = torch.Generator().manual_seed(0)
    embeds = [F.normalize(torch.randn(5, 4, generator=random, dtype=torch.float64), dim=-1) for _ in range(4)]
    scales = [torch.tensor(s, dtype=torch.float64) for s in (14.0, 9.0)]
    return TwoHeads(*(t.requires_grad_() for t in (*embeds, *scales)))


def four_cross_entropies(h: TwoHeads) -> Tensor:
    """As the published training code writes it, with one matrix for each direction and head."""
    labels = torch.arange(5)
    matrices = (
        h.logit_scale_a * h.audio @ h.text_mlp.t(),
        h.logit_scale_a * h.text_mlp @ h.audio.t(),
        h.logit_scale_t * h.audio_mlp @ h.text.t(),
        h.logit_scale_t * h.text @ h.audio_mlp.t(),
    )
    return torch.stack([F.cross_entropy(m, labels) for m in matrices]).mean()


def test_equals_four_cross_entropies() -> None:
    h = heads()
    inputs = [getattr(h, name) for name in NAMES]
    reference = four_cross_entropies(h)
    expected = [reference.detach(), *torch.autograd.grad(reference, inputs)]
    share, gradients, _ = mlp_gradients(h, config=ObjectiveConfig(), chunk=2)
    assert largest_error([share, *(getattr(gradients, name) for name in NAMES)], expected) < 1e-11
    share, figures = mlp_objective(h, config=ObjectiveConfig(), chunk=2)
    assert largest_error([share.detach(), *torch.autograd.grad(share, inputs)], expected) < 1e-11
    assert len(figures) == 2


def test_gradcheck() -> None:
    h = heads()
    inputs = tuple(getattr(h, name) for name in NAMES)
    assert torch.autograd.gradcheck(lambda *t: mlp_objective(TwoHeads(*t), config=ObjectiveConfig())[0], inputs)
