"""The bounded logit scale over ranks: one process with the whole batch would decide on the sum of the gradients."""

from __future__ import annotations

import pytest
import torch

from clap_zero.distributed.collectives import rank_and_size
from clap_zero.model.clap import logit_scale
from clap_zero.testing import run_distributed


def gradient_of(raw: float, weights: tuple[float, float]) -> float:
    """Of the raw parameter on this rank, whose loss is the scale times its own weight."""
    rank, _ = rank_and_size()
    parameter = torch.tensor([raw], requires_grad=True)
    (weights[rank] * logit_scale(parameter)).backward()
    assert parameter.grad is not None
    return parameter.grad.item()


@pytest.mark.parametrize(
    ("raw", "weights", "passes"),
    [
        (4.7, (3.0, -1.0), True),  # a step down on the whole: also through the rank that wants to go up
        (4.7, (1.0, -3.0), False),  # up on the whole: also not through the rank that wants to go down
        (-0.1, (1.0, -3.0), True),
        (-0.1, (3.0, -1.0), False),
        (2.0, (1.0, -3.0), True),
    ],
)
def test_beyond_a_bound_the_ranks_decide_together(raw: float, weights: tuple[float, float], passes: bool) -> None:
    scale = logit_scale(torch.tensor([raw])).item()
    expected = [weight * scale if passes else 0.0 for weight in weights]
    assert run_distributed(gradient_of, 2, raw, weights) == pytest.approx(expected)
