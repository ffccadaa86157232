"""The contrastive objective as one process would write it: slow, obvious, what the others are held to."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from clap_zero.objective.config import ObjectiveConfig
from clap_zero.objective.mlp import TwoHeads


def softmax_reference(
    audio_embeds: Tensor,
    text_embeds: Tensor,
    logit_scale: Tensor,
    groups: Tensor | None = None,
    *,
    config: ObjectiveConfig,
) -> Tensor:
    """Softmax objective of a whole global batch with every option, row by row; papers in `ObjectiveConfig`.

    Without options it is the symmetric cross-entropy of Radford et al. 2021, "Learning Transferable Visual Models From
    Natural Language Supervision", figure 3, with audio in the place of images; one scale in both directions, as in
    LAION's recipe.

    Row i is soft cross-entropy between targets q_i and the softmax of its candidates, L_i = -sum_j q_ij log p_ij:

    - positives off: q_i is 1 at i. mask: the same, and other pairs of i's group are no candidates. soft: q_i is
      1 / |P_i| at every pair of i's group P_i.
    - label smoothing e: q_i becomes (1 - e) q_i + e / (number of candidates).
    - hard negatives beta: L_i = -log(exp(s_ii) / (exp(s_ii) + sum_j w_ij exp(s_ij))) over the N_i negatives j, with
      w_ij = N_i exp(beta s_ij) / sum_k exp(beta s_ik). The gradient goes through the weights, as in Robinson et al.'s
      code: they are part of the value, not constants.

    Args:
        audio_embeds: (B, d), L2-normalised.
        text_embeds: (B, d), L2-normalised.
        logit_scale: ().
        groups: (B,) int64, equal for pairs that share a caption.
        config: The objective.

    Returns:
        (), the mean over the B rows and both directions, in nats.
    """
    num_pairs = audio_embeds.shape[0]
    total = audio_embeds.new_zeros(())
    for rows, columns in ((audio_embeds, text_embeds), (text_embeds, audio_embeds)):
        for i in range(num_pairs):
            same = _same_group(groups, i, num_pairs) if config.uses_groups else {i}
            left_out = same - {i} if config.positives == "mask" else set()
            candidates = [j for j in range(num_pairs) if j not in left_out]
            logits = torch.stack([logit_scale * (rows[i] @ columns[j]) for j in candidates])
            if config.hard_negative_beta:
                total = total + _hard_negative_row(logits, candidates.index(i), config.hard_negative_beta)
                continue
            positives = same if config.positives == "soft" else {i}
            smoothing = config.label_smoothing
            target = torch.tensor(
                [(1 - smoothing) * (j in positives) / len(positives) + smoothing / len(candidates) for j in candidates],
                dtype=logits.dtype,
            )
            total = total - (target * torch.log_softmax(logits, 0)).sum()
    return total / (2 * num_pairs)


def sigmoid_reference(
    audio_embeds: Tensor,
    text_embeds: Tensor,
    logit_scale: Tensor,
    logit_bias: Tensor,
    groups: Tensor | None = None,
    *,
    config: ObjectiveConfig,
) -> Tensor:
    """Sigmoid objective of a whole global batch: every clip and every caption are a yes or no question.

    Zhai et al. 2023, algorithm 1: -sum_ij log sigmoid(z_ij (scale cos_ij + bias)) / B, z_ij = 1 at the pairs
    themselves and -1 elsewhere. Other pairs of an equal group: z = -1 (positives off), left out (mask), z = 1 (soft).

    Args:
        audio_embeds: (B, d), L2-normalised.
        text_embeds: (B, d), L2-normalised.
        logit_scale: ().
        logit_bias: ().
        groups: (B,) int64, equal for pairs that share a caption.
        config: The objective.

    Returns:
        (), in nats.
    """
    num_pairs = audio_embeds.shape[0]
    total = audio_embeds.new_zeros(())
    for i in range(num_pairs):
        same = _same_group(groups, i, num_pairs) if config.uses_groups else {i}
        for j in range(num_pairs):
            if config.positives == "mask" and j in same and j != i:
                continue
            label = 1 if j == i or (config.positives == "soft" and j in same) else -1
            logit = logit_scale * (audio_embeds[i] @ text_embeds[j]) + logit_bias
            total = total - logsigmoid(label * logit)
    return total / num_pairs


def mlp_reference(heads: TwoHeads, groups: Tensor | None = None, *, config: ObjectiveConfig) -> Tensor:
    """LAION's objective of a whole global batch for a model with the extra heads.

    Wu et al. 2023, "Large-scale Contrastive Language-Audio Pretraining with Feature Fusion and Keyword-to-Caption
    Augmentation", published code, option `clap-mlploss`: a clip is compared with captions that went through their head,
    by the first scale, and a clip that went through its head with captions, by the second. Each comparison is a softmax
    objective in both directions; the loss is the mean of the four.

    Args:
        heads: Of all B pairs.
        groups: (B,) int64, equal for pairs that share a caption.
        config: The objective of each comparison.

    Returns:
        (), in nats.
    """
    first = softmax_reference(heads.audio, heads.text_mlp, heads.logit_scale_a, groups, config=config)
    second = softmax_reference(heads.audio_mlp, heads.text, heads.logit_scale_t, groups, config=config)
    return (first + second) / 2


def _same_group(groups: Tensor | None, i: int, num_pairs: int) -> set[int]:
    assert groups is not None
    return {j for j in range(num_pairs) if groups[j] == groups[i]}


def _hard_negative_row(logits: Tensor, own: int, beta: float) -> Tensor:
    negatives = torch.cat([logits[:own], logits[own + 1 :]])
    if negatives.numel() == 0:
        return 0 * logits.sum()
    log_weights = math.log(negatives.numel()) + torch.log_softmax(beta * negatives, 0)
    # log(w exp(s)) = log w + s, so that nothing overflows at a scale of 100.
    return torch.logsumexp(torch.cat([logits[own : own + 1], log_weights + negatives]), 0) - logits[own]
