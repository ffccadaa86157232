"""Outputs of several micro batches as one, and the chain rule through one of them, on uneven micro batches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from clap_zero.model.clap import ContrastOutput
from clap_zero.objective.config import ObjectiveConfig
from clap_zero.training.objective import RunObjective, joined, surrogate

SIZES = (3, 1, 4)


def parameters() -> tuple[Tensor, ...]:
    """Clips, captions (8, 5), scale and bias, float64, with gradient."""
    random = torch.Generator().manual_seed(0)
    rows = [torch.nn.functional.normalize(torch.randn(8, 5, generator=random).double(), dim=1) for _ in range(2)]
    return tuple(t.requires_grad_() for t in (*rows, torch.tensor(9.0).double(), torch.tensor(-2.0).double()))


def outputs_of(given: tuple[Tensor, ...]) -> list[ContrastOutput]:
    """What a model would give for each micro batch."""
    audio, text, scale, bias = given
    parts = zip(audio.split(SIZES), text.split(SIZES), strict=True)
    return [ContrastOutput(2 * clips, 3 * captions, scale.exp(), bias + 1) for clips, captions in parts]


def test_joined_has_rows_in_order_and_the_last_scalars() -> None:
    outputs = [
        ContrastOutput(torch.full((size, 2), float(index)), torch.full((size, 2), -float(index)), torch.tensor(index))
        for index, size in enumerate(SIZES)
    ]
    whole = joined(outputs)
    assert whole.audio_embeds[:, 0].tolist() == [0, 0, 0, 1, 2, 2, 2, 2]
    assert torch.equal(whole.text_embeds, -whole.audio_embeds)
    assert whole.logit_scale == 2
    assert whole.logit_bias is None and whole.audio_mlp is None and whole.logit_scale_t is None


@pytest.mark.parametrize("count", [len(SIZES)])
def test_surrogates_of_the_parts_have_the_gradient_of_the_whole(count: int) -> None:
    """Rows by rows, and the scalars' gradient in equal shares."""
    given = parameters()
    whole = joined(outputs_of(given))
    random = torch.Generator().manual_seed(1)
    gradients = ContrastOutput(
        *(None if t is None else torch.randn(t.shape, generator=random, dtype=t.dtype) for t in whole)
    )
    wanted = sum((t * g).sum() for t, g in zip(whole, gradients, strict=True) if t is not None)
    expected = torch.autograd.grad(wanted, given)
    first, found = 0, [torch.zeros_like(t) for t in given]
    for output, size in zip(outputs_of(given), SIZES, strict=True):
        part = surrogate(output, gradients, rows=slice(first, first + size), share=1 / count)
        first += size
        for total, gradient in zip(found, torch.autograd.grad(part, given), strict=True):
            total += gradient
    for ours, right in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_both_calls_of_the_objective_are_one(loss: str) -> None:
    """Through autograd, as one pass takes it, and by gradients, as cached passes do."""
    given, groups = parameters(), torch.arange(8) // 2
    bias = given[3] if loss == "sigmoid" else None
    output = ContrastOutput(*given[:3], bias)
    objective = RunObjective(ObjectiveConfig(loss=loss, positives="soft"))  # type: ignore[arg-type]
    share, figures = objective.share(output, groups)
    value, gradients, again = objective.gradients(output, groups)
    assert torch.equal(share, value) and all(torch.equal(a, b) for a, b in zip(figures, again, strict=True))
    inputs = given if bias is not None else given[:3]
    for ours, right in zip(torch.autograd.grad(share, inputs), gradients, strict=False):
        torch.testing.assert_close(ours, right, rtol=1e-12, atol=0)
