"""The chunked objective as a function for autograd."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from clap_zero.objective.autograd import contrastive_objective
from clap_zero.objective.config import ObjectiveConfig
from clap_zero.objective.reference import softmax_reference
from tests.unit.objective.cases import VARIANTS, Case, make_case

variants = pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS.keys())
SHARED = (0, 1, 0, 2, 3, 3)


def inputs_of(case: Case, config: ObjectiveConfig) -> list[torch.Tensor]:
    return [t.clone().requires_grad_() for t in case[: 4 if config.uses_bias else 3]]


@variants
def test_gradcheck(config: ObjectiveConfig) -> None:
    case = make_case((0, 1, 0, 2, 3), scale=5.0, width=2)

    def loss(audio: torch.Tensor, text: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None):
        return contrastive_objective(audio, text, scale, logit_bias=bias, groups=case.groups, config=config, chunk=3)[0]

    assert torch.autograd.gradcheck(loss, inputs_of(case, config))


def test_gradcheck_sees_a_wrong_factor() -> None:
    """A loss whose gradient is off by 2 fails the check: the value is halved where no gradient sees it."""
    case = make_case(SHARED, scale=5.0, width=3)

    def loss(*inputs: torch.Tensor):
        share = contrastive_objective(*inputs, config=ObjectiveConfig(positives="off"))[0]
        return share - share.detach() / 2

    with pytest.raises(RuntimeError, match="Jacobian mismatch"):
        torch.autograd.gradcheck(loss, inputs_of(case, ObjectiveConfig(positives="off")))


def test_through_normalisation_and_exponential() -> None:
    """As a model uses it, against the slow reference."""
    random = torch.Generator().manual_seed(3)
    raw = [torch.randn(9, 6, generator=random, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    raw.append(torch.tensor([2.5], dtype=torch.float64, requires_grad=True))

    def gradients(loss):
        audio, text = (F.normalize(t, dim=-1) for t in raw[:2])
        return torch.autograd.grad(loss(audio, text, raw[2].exp().reshape(())), raw)

    ours = gradients(
        lambda *inputs: contrastive_objective(*inputs, config=ObjectiveConfig(positives="off"), chunk=4)[0]
    )
    for a, b in zip(
        ours,
        gradients(lambda *inputs: softmax_reference(*inputs, config=ObjectiveConfig(positives="off"))),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


@variants
def test_a_loss_scale_of_2_to_the_16(config: ObjectiveConfig) -> None:
    """Where DeepSpeed's fp16 begins; on embeddings in float32, as the model hands them over, it is exact."""
    case = make_case(SHARED).to(torch.float32)
    inputs = inputs_of(case, config)
    bias = inputs[3] if config.uses_bias else None
    share, _ = contrastive_objective(*inputs[:3], logit_bias=bias, groups=case.groups, config=config)
    small = torch.autograd.grad(share, inputs, retain_graph=True)
    large = torch.autograd.grad(share * 2.0**16, inputs)
    assert all(torch.equal(a * 2.0**16, b) for a, b in zip(small, large, strict=True))


@variants
def test_half_precision_has_its_gradient_in_half(config: ObjectiveConfig) -> None:
    """In the dtype of each input; 2^10 times the share has 2^10 times the gradient, 2^16 would overflow there."""
    case = make_case(SHARED)
    inputs = [t.to(torch.float16) for t in case[:2]] + [t.to(torch.float32) for t in case[2:4]]
    inputs = [t.requires_grad_() for t in inputs[: 4 if config.uses_bias else 3]]
    bias = inputs[3] if config.uses_bias else None
    share, _ = contrastive_objective(*inputs[:3], logit_bias=bias, groups=case.groups, config=config)
    assert share.dtype == torch.float32
    small = torch.autograd.grad(share, inputs, retain_graph=True)
    large = torch.autograd.grad(share * 2.0**10, inputs)
    for x, a, b in zip(inputs, small, large, strict=True):
        assert a.dtype == b.dtype == x.dtype
        assert b.isfinite().all()
        torch.testing.assert_close(a.float() * 2.0**10, b.float(), rtol=2e-3, atol=1e-3)


def test_figures_have_no_gradient() -> None:
    case = make_case(SHARED)
    share, figures = contrastive_objective(
        *inputs_of(case, ObjectiveConfig(positives="off")), config=ObjectiveConfig(positives="off")
    )
    assert share.requires_grad
    assert not any(figure.requires_grad for figure in figures)


def test_an_input_without_gradient() -> None:
    """A frozen scale, or a frozen tower."""
    case = make_case(SHARED)
    audio = case.audio.clone().requires_grad_()
    share, _ = contrastive_objective(audio, case.text, case.scale, config=ObjectiveConfig(positives="off"))
    share.backward()
    assert not case.text.requires_grad and case.text.grad is None and case.scale.grad is None
    every = inputs_of(case, ObjectiveConfig(positives="off"))
    contrastive_objective(*every, config=ObjectiveConfig(positives="off"))[0].backward()
    assert torch.equal(audio.grad, every[0].grad)
