"""The contrastive objective as one process would write it: slow, obvious, what the others are held to."""

from __future__ import annotations

import torch
from torch import Tensor


def contrastive_loss_reference(audio_embeds: Tensor, text_embeds: Tensor, logit_scale: Tensor) -> Tensor:
    """Symmetric cross-entropy of a whole global batch: clip i belongs to caption i, all others are negatives.

    Radford et al. 2021, "Learning Transferable Visual Models From Natural Language Supervision", figure 3, with audio
    in the place of images; one scale in both directions, as in LAION's recipe.

    Args:
        audio_embeds: (B, d), L2-normalised.
        text_embeds: (B, d), L2-normalised.
        logit_scale: (), the factor on cosine similarities (not its logarithm).

    Returns:
        (), the mean over the B rows and both directions, in nats.
    """
    num_pairs = audio_embeds.shape[0]
    total = audio_embeds.new_zeros(())
    for i in range(num_pairs):
        audio_to_text = logit_scale * torch.stack([audio_embeds[i] @ text_embeds[j] for j in range(num_pairs)])
        text_to_audio = logit_scale * torch.stack([text_embeds[i] @ audio_embeds[j] for j in range(num_pairs)])
        total = total - torch.log_softmax(audio_to_text, 0)[i] - torch.log_softmax(text_to_audio, 0)[i]
    return total / (2 * num_pairs)
