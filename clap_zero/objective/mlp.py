"""LAION's objective for models with the extra heads: two contrastive losses, each with a scale of its own.

LAION normalises embeddings before the heads and not after them, so the product of a clip and a caption through its head
is no cosine. The objective does not need one: rows may have any length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from clap_zero.objective.autograd import contrastive_objective
from clap_zero.objective.chunked import objective_gradients
from clap_zero.objective.figures import ObjectiveFigures, mean_figures


@dataclass(frozen=True)
class TwoHeads:
    """One rank's embeddings before and after the extra heads, (n, d) each, and two scales, () each.

    Attributes:
        audio: Clips, L2-normalised.
        text: Captions, L2-normalised.
        audio_mlp: Clips through their extra head, of any length.
        text_mlp: Captions through their extra head, of any length.
        logit_scale_a: Factor on the products of `audio` and `text_mlp`.
        logit_scale_t: Factor on the products of `audio_mlp` and `text`.
    """

    audio: Tensor
    text: Tensor
    audio_mlp: Tensor
    text_mlp: Tensor
    logit_scale_a: Tensor
    logit_scale_t: Tensor


def mlp_gradients(heads: TwoHeads, **settings: Any) -> tuple[Tensor, TwoHeads, ObjectiveFigures]:
    """Mean of the objective of (audio, text_mlp, scale a) and that of (audio_mlp, text, scale t).

    Wu et al. 2023, "Large-scale Contrastive Language-Audio Pretraining with Feature Fusion and Keyword-to-Caption
    Augmentation"; the loss of its published code with `mlp_loss`.

    Args:
        heads: Embeddings and scales of this rank.
        **settings: config, groups, gather and chunk, as in `objective_gradients`; the softmax loss only.

    Returns:
        () share; gradients in the places of what they belong to; figures, means of both parts, with products where
        the usual ones have cosines.

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
    return (first.loss + second.loss) / 2, gradients, mean_figures([first.figures, second.figures])


def mlp_objective(heads: TwoHeads, **settings: Any) -> tuple[Tensor, ObjectiveFigures]:
    """The same with gradient through autograd.

    Args:
        heads: Embeddings and scales of this rank.
        **settings: As in `contrastive_objective`.

    Returns:
        () share with gradient; figures, means of both parts.

    Collective in the forward unless gather is off: all ranks must call.
    """
    first, first_figures = contrastive_objective(heads.audio, heads.text_mlp, heads.logit_scale_a, **settings)
    second, second_figures = contrastive_objective(heads.audio_mlp, heads.text, heads.logit_scale_t, **settings)
    return (first + second) / 2, mean_figures([first_figures, second_figures])
