"""Every variant of the objective, batches for it, and its slow reference with gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from clap_zero.objective.chunked import ObjectiveGradients, objective_gradients
from clap_zero.objective.config import ObjectiveConfig
from clap_zero.objective.reference import sigmoid_reference, softmax_reference
from tests.worst import worst

VARIANTS = {
    "softmax": ObjectiveConfig(positives="off"),
    "softmax-mask": ObjectiveConfig(positives="mask"),
    "softmax-soft": ObjectiveConfig(positives="soft"),
    "smoothing": ObjectiveConfig(label_smoothing=0.1, positives="off"),
    "smoothing-mask": ObjectiveConfig(label_smoothing=0.1, positives="mask"),
    "smoothing-soft": ObjectiveConfig(label_smoothing=0.1, positives="soft"),
    "hard": ObjectiveConfig(hard_negative_beta=0.5, positives="off"),
    "hard-mask": ObjectiveConfig(hard_negative_beta=1.5, positives="mask"),
    "sigmoid": ObjectiveConfig(loss="sigmoid", positives="off"),
    "sigmoid-mask": ObjectiveConfig(loss="sigmoid", positives="mask"),
    "sigmoid-soft": ObjectiveConfig(loss="sigmoid", positives="soft"),
}


class Case(NamedTuple):
    """A global batch.

    Attributes:
        audio: (B, d) normalised.
        text: (B, d) normalised.
        scale: ().
        bias: () for the sigmoid loss.
        groups: (B,) int64.
    """

    audio: Tensor
    text: Tensor
    scale: Tensor
    bias: Tensor
    groups: Tensor

    def to(self, dtype: torch.dtype) -> Case:
        return Case(*(t if t is self.groups else t.to(dtype) for t in self))


def make_case(groups: Sequence[int], *, scale: float = 14.0, width: int = 5, seed: int = 0) -> Case:
    """Random float64 embeddings, one pair for each entry of `groups`; pairs of equal group have the same caption."""
    random = torch.Generator().manual_seed(seed)
    audio, text = (torch.randn(len(groups), width, generator=random, dtype=torch.float64) for _ in range(2))
    first = [list(groups).index(group) for group in groups]
    numbers = [torch.tensor(x, dtype=torch.float64) for x in (scale, -3.0)]
    return Case(F.normalize(audio, dim=-1), F.normalize(text[first], dim=-1), *numbers, torch.tensor(list(groups)))


def value_and_gradients(case: Case, config: ObjectiveConfig) -> list[Tensor]:
    """Loss by the slow reference, and its gradients with respect to clips, captions, scale and, if it has one, bias."""
    inputs = [t.clone().requires_grad_() for t in case[: 4 if config.uses_bias else 3]]
    reference = sigmoid_reference if config.uses_bias else softmax_reference
    loss = reference(*inputs, case.groups, config=config)
    return [loss.detach(), *torch.autograd.grad(loss, inputs)]


def chunked(
    case: Case, config: ObjectiveConfig, *, chunk: int | None = None, gather: bool = True
) -> ObjectiveGradients:
    return objective_gradients(
        case.audio,
        case.text,
        logit_scale=case.scale,
        logit_bias=case.bias if config.uses_bias else None,
        groups=case.groups,
        config=config,
        gather=gather,
        chunk=chunk,
    )


def flat(result: ObjectiveGradients) -> list[Tensor]:
    """In the order of `value_and_gradients`."""
    bias = [] if result.logit_bias is None else [result.logit_bias]
    return [result.loss, result.audio, result.text, result.logit_scale, *bias]


def largest_error(ours: Sequence[Tensor], reference: Sequence[Tensor], *, floor: float = 1e-6) -> float:
    """The largest ||a - b|| / max(||b||, floor) over loss and gradients."""
    pairs = zip(ours, reference, strict=True)
    return worst(
        {
            str(place): float((a.double() - b.double()).norm() / max(float(b.double().norm()), floor))
            for place, (a, b) in enumerate(pairs)
        }
    )[0]
