"""LAION's objective for models with the extra heads: two contrastive losses, each with a scale of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from clap_zero.objective.autograd import contrastive_objective
from clap_zero.objective.chunked import ObjectiveGradients, objective_gradients
from clap_zero.objective.figures import ObjectiveFigures


@dataclass(frozen=True)
class TwoHeads:
    """One rank's embeddings before and after the extra heads; (n, d) each, L2-normalised, and two scales, () each.

    Attributes:
        audio: Clips.
        text: Captions.
        audio_mlp: Clips through their extra head.
        text_mlp: Captions through their extra head.
        logit_scale_a: Factor on the cosines of `audio` and `text_mlp`.
        logit_scale_t: Factor on the cosines of `audio_mlp` and `text`.
    """

    audio: Tensor
    text: Tensor
    audio_mlp: Tensor
    text_mlp: Tensor
    logit_scale_a: Tensor
    logit_scale_t: Tensor


def mlp_gradients(heads: TwoHeads, **settings: Any) -> tuple[Tensor, TwoHeads, tuple[ObjectiveFigures, ...]]:
    """Mean of the objective of (audio, text_mlp, scale a) and that of (audio_mlp, text, scale t).

    Wu et al. 2023, "Large-scale Contrastive Language-Audio Pretraining with Feature Fusion and Keyword-to-Caption
    Augmentation"; the loss of its published code with `mlp_loss`.

    Args:
        heads: Embeddings and scales of this rank.
        **settings: config, groups, gather and chunk, as in `objective_gradients`; the softmax loss only.

    Returns:
        () share; gradients in the places of what they belong to; figures of both parts.

    Collective unless gather is off: all ranks must call.
    """
    first = objective_gradients(heads.audio, heads.text_mlp, logit_scale=heads.logit_scale_a, **settings)
    second = objective_gradients(heads.audio_mlp, heads.text, logit_scale=heads.logit_scale_t, **settings)
    gradients = TwoHeads(
        audio=first.audio / 2,
        text=second.text / 2,
        audio_mlp=second.audio / 2,
        text_mlp=first.text / 2,
        logit_scale_a=first.logit_scale / 2,
        logit_scale_t=second.logit_scale / 2,
    )
    return _mean(first, second), gradients, (first.figures, second.figures)


def mlp_objective(heads: TwoHeads, **settings: Any) -> tuple[Tensor, tuple[ObjectiveFigures, ...]]:
    """The same with gradient through autograd.

    Args:
        heads: Embeddings and scales of this rank.
        **settings: As in `contrastive_objective`.

    Returns:
        () share with gradient; figures of both parts.

    Collective in the forward unless gather is off: all ranks must call.
    """
    first, first_figures = contrastive_objective(heads.audio, heads.text_mlp, heads.logit_scale_a, **settings)
    second, second_figures = contrastive_objective(heads.audio_mlp, heads.text, heads.logit_scale_t, **settings)
    return (first + second) / 2, (first_figures, second_figures)


def _mean(first: ObjectiveGradients, second: ObjectiveGradients) -> Tensor:
    return (first.loss + second.loss) / 2
