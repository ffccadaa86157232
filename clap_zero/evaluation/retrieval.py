"""Retrieval between clips and captions, from embeddings alone.

Conventions (LAION-AI/CLAP `evaluate_clotho_audiocaps`, written so that nothing depends on the order of the data):

- The rank of a relevant item is 1 + the items that score higher + half of the other items that score the same. Ties
  are in the middle, so a model that maps everything to one point is near the middle, not at the top.
- text_to_audio: each caption asks for its one clip among all clips; figures are means over all captions.
- audio_to_text: each clip asks for its n captions among all captions. Its sorted ranks r_1 < ... < r_n count its own
  better captions as well; R@k and the median rank take r_1, the best. Own captions with equal scores follow each other.
- mAP@10: the sum over i of i / r_i where r_i <= 10, divided by n always. With one relevant item that is 1 / r.
- Equal captions of different clips stay different captions, each relevant to its own clip only, as published figures
  count them. Their scores are equal, so each of them gets the middle of the tie.
- Scores within 1e-6 are equal: the same clip or text embedded in two batches differs by rounding.
- R@k and mAP@10 are fractions, 0 to 1; the median rank counts from 1.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from clap_zero.errors import DataError, DivergedError

TIE_TOLERANCE = 1e-6
MAX_BLOCK_ELEMENTS = 8 << 20
"""Scores held at once (32 MB): the whole matrix of 30,000 by 30,000 would be 3.6 GB."""
RECALL_AT = (1, 5, 10)
MAP_AT = 10


def retrieval_metrics(audio_embeds: Tensor, text_embeds: Tensor, caption_clips: Tensor) -> dict[str, float]:
    """Metrics in both directions.

    Args:
        audio_embeds: (n, d) L2-normalised, one row a clip.
        text_embeds: (c, d) L2-normalised, one row a caption.
        caption_clips: (c,) int64, the row of audio_embeds that each caption belongs to.

    Returns:
        `audio_to_text.` and `text_to_audio.` with `R@1`, `R@5`, `R@10`, `mAP@10` (fractions) and `median_rank`.

    Raises:
        DataError: There is nothing to rank, or a clip without a caption.
        DivergedError: An embedding is not finite (every comparison with it would be false, and its rank perfect).
    """
    num_clips, num_captions = len(audio_embeds), len(text_embeds)
    assert caption_clips.shape == (num_captions,) and audio_embeds.shape[1:] == text_embeds.shape[1:]
    if num_clips == 0 or num_captions == 0:
        raise DataError(f"nothing to evaluate: {num_clips} clips and {num_captions} captions")
    counts = torch.bincount(caption_clips, minlength=num_clips)
    assert len(counts) == num_clips, "a caption belongs to a clip that is not there"
    if (counts == 0).any():
        missing = int((counts == 0).nonzero()[0])
        raise DataError(f"clip {missing} of {num_clips} has no caption, so retrieval is not defined for it")
    for name, embeds in (("audio", audio_embeds), ("text", text_embeds)):
        bad = int((~embeds.isfinite().all(dim=1)).sum())
        if bad:
            raise DivergedError(
                f"{bad} of {len(embeds)} {name} embeddings are not finite: the model has diverged; go back to an "
                "earlier checkpoint with a lower learning rate"
            )
    audio, text = audio_embeds.float(), text_embeds.float()
    backward = _ranks_of_captions(audio, text, caption_clips, counts)
    forward = _ranks_of_clips(audio, text, caption_clips)
    return {
        **_summary("audio_to_text", backward, counts),
        **_summary("text_to_audio", forward[:, None], torch.ones_like(caption_clips)),
    }


def _ranks_of_clips(audio: Tensor, text: Tensor, caption_clips: Tensor) -> Tensor:
    """(c,) float64: the rank of each caption's clip among all clips."""
    ranks = []
    rows = max(1, MAX_BLOCK_ELEMENTS // len(audio))
    for block, own in zip(text.split(rows), caption_clips.split(rows), strict=True):
        scores = block @ audio.T
        target = scores.gather(1, own[:, None])
        scores.scatter_(1, own[:, None], -torch.inf)
        ranks.append(1 + _number_before(scores, target))
    return torch.cat(ranks)


def _ranks_of_captions(audio: Tensor, text: Tensor, caption_clips: Tensor, counts: Tensor) -> Tensor:
    """(n, most captions of a clip) float64: sorted ranks of each clip's captions among all, inf where it has fewer."""
    widest = int(counts.max())
    # Captions of a clip side by side: row i of `own` holds the places of clip i's captions, padded with its first one.
    order = caption_clips.argsort(stable=True)
    starts = counts.cumsum(0) - counts
    column = torch.arange(widest, device=counts.device)
    exists = column < counts[:, None]
    own = order[torch.where(exists, starts[:, None] + column, starts[:, None])]
    ranks = []
    rows = max(1, MAX_BLOCK_ELEMENTS // len(text))
    for block, places, real in zip(audio.split(rows), own.split(rows), exists.split(rows), strict=True):
        scores = block @ text.T
        mine = scores.gather(1, places).masked_fill(~real, -torch.inf).sort(dim=1, descending=True).values
        scores.scatter_(1, places, -torch.inf)
        foreign = torch.cat([_number_before(scores, mine[:, [i]])[:, None] for i in range(widest)], dim=1)
        # `mine` is sorted, so the i-th best own caption comes after i own ones and `foreign` others.
        ranks.append((foreign + column + 1).masked_fill(mine.isneginf(), torch.inf))
    return torch.cat(ranks)


def _number_before(scores: Tensor, target: Tensor) -> Tensor:
    """(rows,) float64: scores above the target, and half of those equal to it. target: (rows, 1)."""
    above = (scores > target + TIE_TOLERANCE).sum(dim=1, dtype=torch.float64)
    not_below = (scores >= target - TIE_TOLERANCE).sum(dim=1, dtype=torch.float64)
    return (above + not_below) / 2


def _summary(direction: str, ranks: Tensor, counts: Tensor) -> dict[str, float]:
    """Figures of one direction from sorted ranks (queries, most relevant items of one), inf where there are fewer."""
    best = ranks[:, 0]
    order = torch.arange(1, ranks.shape[1] + 1, device=ranks.device)
    precision = torch.where(ranks <= MAP_AT, order / ranks, 0.0).sum(dim=1) / counts
    figures = {f"R@{k}": (best <= k).double().mean() for k in RECALL_AT}
    figures |= {f"mAP@{MAP_AT}": precision.double().mean(), "median_rank": best.quantile(0.5)}
    return {f"{direction}.{name}": float(value) for name, value in figures.items()}


def mean_map(metrics: Mapping[str, float]) -> float:
    """The one number by which checkpoints are compared: mean of mAP@10 in both directions."""
    return (metrics[f"audio_to_text.mAP@{MAP_AT}"] + metrics[f"text_to_audio.mAP@{MAP_AT}"]) / 2
