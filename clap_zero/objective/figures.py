"""What people watch while a contrastive model trains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

MAY_LACK = ("hardest_negative_similarity",)
"""Figures that are NaN for a loss without negatives."""


class ObjectiveFigures(NamedTuple):
    """Means over the rows of this rank against the candidates of all ranks; the mean over ranks is the global figure.

    All are () without gradient. A negative is a candidate that is not a positive: with `positives` off every other
    row is one, with mask and soft those of an equal group are not.

    Attributes:
        loss_audio_to_text: Loss of the clips' rows, in nats.
        loss_text_to_audio: Loss of the captions' rows, in nats.
        top1_audio_to_text: Share of clips whose own caption is closer than every negative; a tie is no hit.
        top1_text_to_audio: Share of captions whose own clip is closer than every negative.
        positive_similarity: Cosine of a clip and its own caption.
        hardest_negative_similarity: Cosine to the closest negative, over the rows of both directions; NaN without
            negatives, which is so for all rows at once (one pair, or one group), and leaves no row that is no hit.

    With the sigmoid loss the two directions' losses are sums over the same cells: over all ranks they are one number.
    """

    loss_audio_to_text: Tensor
    loss_text_to_audio: Tensor
    top1_audio_to_text: Tensor
    top1_text_to_audio: Tensor
    positive_similarity: Tensor
    hardest_negative_similarity: Tensor


def mean_figures(parts: Sequence[ObjectiveFigures]) -> ObjectiveFigures:
    """Means over losses of equally many pairs; what a loss without negatives has no figure for, over the others."""
    columns = {name: torch.stack([getattr(part, name) for part in parts]) for name in ObjectiveFigures._fields}
    return ObjectiveFigures(
        **{n: column.nanmean() if n in MAY_LACK else column.mean() for n, column in columns.items()}
    )


def longest_product(audio: Tensor, text: Tensor) -> Tensor:
    """The largest product that a clip and a caption could have by their lengths, ().

    Args:
        audio: (n, d), L2-normalised or of any length, as LAION's extra heads give it.
        text: (m, d) likewise.

    Returns:
        Exactly 1 where both are normalised.
    """
    longest = torch.linalg.vector_norm(audio, dim=1).amax() * torch.linalg.vector_norm(text, dim=1).amax()
    return torch.where((longest - 1).abs() < 1e-3, torch.ones_like(longest), longest)
