"""The definition of the objective, held to sums by hand and to torch."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from clap_zero.objective.config import ObjectiveConfig
from clap_zero.objective.reference import sigmoid_reference, softmax_reference

PLAIN = ObjectiveConfig(positives="off")


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
    assert softmax_reference(audio, text, scale, config=PLAIN).item() == pytest.approx(expected, rel=1e-12)


def test_equal_embeddings_give_the_logarithm_of_the_batch() -> None:
    same = F.normalize(torch.ones(6, 3, dtype=torch.float64), dim=-1)
    loss = softmax_reference(same, same, torch.tensor(100.0, dtype=torch.float64), config=PLAIN)
    assert loss.item() == pytest.approx(math.log(6), rel=1e-12)


def test_the_directions_differ() -> None:
    """ClapModel's own loss computes one direction twice; ours must change when the other direction does."""
    audio, text = embeddings(5)
    scale = torch.tensor(10.0, dtype=torch.float64)
    labels = torch.arange(5)
    one_direction = F.cross_entropy(scale * text @ audio.t(), labels)
    both = (one_direction + F.cross_entropy(scale * audio @ text.t(), labels)) / 2
    assert softmax_reference(audio, text, scale, config=PLAIN).item() == pytest.approx(both.item(), rel=1e-12)
    assert abs(both - one_direction) > 1e-3


def test_smoothing_is_that_of_torch() -> None:
    audio, text = embeddings(5)
    scale, labels = torch.tensor(10.0, dtype=torch.float64), torch.arange(5)
    logits = scale * audio @ text.t()
    expected = sum(F.cross_entropy(x, labels, label_smoothing=0.3) for x in (logits, logits.t())) / 2
    ours = softmax_reference(audio, text, scale, config=ObjectiveConfig(label_smoothing=0.3, positives="off"))
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=0)


def test_shared_captions_by_hand() -> None:
    """Three pairs, 0 and 2 with the same caption; cosines 1 with their own, 0 otherwise, scale 2."""
    audio, text = torch.eye(3, dtype=torch.float64), torch.eye(3, dtype=torch.float64)
    scale, groups = torch.tensor(2.0, dtype=torch.float64), torch.tensor([4, 9, 4])

    def loss(positives) -> float:
        return softmax_reference(audio, text, scale, groups, config=ObjectiveConfig(positives=positives)).item()

    three, two = math.log(math.exp(2) + 2), math.log(math.exp(2) + 1)
    assert loss("off") == pytest.approx(three - 2)
    assert loss("mask") == pytest.approx((2 * (two - 2) + three - 2) / 3)
    assert loss("soft") == pytest.approx((2 * (three - 1) + three - 2) / 3)


def test_hard_negatives_by_hand() -> None:
    """Weights are N exp(beta s) / sum exp(beta s): their mean is 1, and beta 0 is plain softmax."""
    audio, text = embeddings(4)
    scale, beta = torch.tensor(3.0, dtype=torch.float64), 0.7
    total = 0.0
    for logits in (scale * audio @ text.t(), scale * text @ audio.t()):
        for i in range(4):
            others = [logits[i, j].item() for j in range(4) if j != i]
            weights = [3 * math.exp(beta * s) / sum(math.exp(beta * x) for x in others) for s in others]
            assert sum(weights) == pytest.approx(3)
            denominator = math.exp(logits[i, i]) + sum(w * math.exp(s) for w, s in zip(weights, others, strict=True))
            total += math.log(denominator) - logits[i, i].item()
    ours = softmax_reference(audio, text, scale, config=ObjectiveConfig(hard_negative_beta=beta, positives="off"))
    assert ours.item() == pytest.approx(total / 8)


def test_the_weights_of_hard_negatives_have_a_gradient() -> None:
    """Constants would give another gradient; that is a decision, and this is where it shows."""
    audio, text = embeddings(4)
    scale, beta = torch.tensor(3.0, dtype=torch.float64), 0.7

    def gradient(constant: bool) -> torch.Tensor:
        rows = audio.clone().requires_grad_()
        total = rows.new_zeros(())
        for logits in (scale * rows @ text.t(), scale * text @ rows.t()):
            off = logits.masked_fill(torch.eye(4, dtype=torch.bool), -math.inf)
            weights = 3 * torch.softmax(beta * off, 1)
            weights = (weights.detach() if constant else weights) + torch.eye(4)
            total = total + ((weights * logits.exp()).sum(1).log() - logits.diagonal()).sum() / 8
        return torch.autograd.grad(total, rows)[0]

    rows = audio.clone().requires_grad_()
    ours = torch.autograd.grad(
        softmax_reference(rows, text, scale, config=ObjectiveConfig(hard_negative_beta=beta, positives="off")), rows
    )[0]
    torch.testing.assert_close(ours, gradient(constant=False), rtol=1e-10, atol=1e-12)
    assert (ours - gradient(constant=True)).norm() > 0.05 * ours.norm()


def test_sigmoid_by_hand() -> None:
    """Two pairs: two positives and two negatives, summed, over the number of pairs."""
    audio, text = torch.eye(2, dtype=torch.float64), torch.eye(2, dtype=torch.float64)
    scale, bias = torch.tensor(10.0, dtype=torch.float64), torch.tensor(-4.0, dtype=torch.float64)
    positive, negative = math.log1p(math.exp(-6)), math.log1p(math.exp(-4))
    ours = sigmoid_reference(audio, text, scale, bias, config=ObjectiveConfig(loss="sigmoid", positives="off"))
    assert ours.item() == pytest.approx((2 * positive + 2 * negative) / 2)
    groups = torch.tensor([1, 1])
    masked = sigmoid_reference(audio, text, scale, bias, groups, config=ObjectiveConfig("sigmoid", "mask"))
    assert masked.item() == pytest.approx(positive)
    several = sigmoid_reference(audio, text, scale, bias, groups, config=ObjectiveConfig("sigmoid", "soft"))
    assert several.item() == pytest.approx(positive + math.log1p(math.exp(4)))
