"""The contrastive objective over the global micro batch: embeddings of all ranks gathered with gradient."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from clap_zero.distributed.collectives import all_gather_with_gradient, rank_and_size


def contrastive_loss(audio_embeds: Tensor, text_embeds: Tensor, logit_scale: Tensor) -> Tensor:
    """This rank's share of the symmetric cross-entropy over the pairs of all ranks.

    The share is the mean over the rank's own b rows and both directions, against all B = world * b candidates. The
    global loss is the mean of the shares over ranks; with gradients averaged over ranks (as DeepSpeed does) the
    gradient is exactly that of `reference.contrastive_loss_reference` on the global batch.

    Args:
        audio_embeds: (b, d) fp32 or fp64, L2-normalised; b is the same on all ranks.
        text_embeds: (b, d), row i captions row i of `audio_embeds`.
        logit_scale: (), the factor on cosine similarities (not its logarithm).

    Returns:
        (), in nats.

    Collective in forward and backward: all ranks must call.
    """
    assert audio_embeds.shape == text_embeds.shape, (audio_embeds.shape, text_embeds.shape)
    rank, _ = rank_and_size()
    num_local = audio_embeds.shape[0]
    all_text = all_gather_with_gradient(text_embeds)
    all_audio = all_gather_with_gradient(audio_embeds)
    labels = torch.arange(num_local, device=audio_embeds.device) + rank * num_local
    # Autocast would run these products in half precision, where cosines are off by 2e-3 and a scale of 100 by 1 %.
    with torch.autocast(audio_embeds.device.type, enabled=False):
        audio_to_text = logit_scale * (audio_embeds @ all_text.t())
        text_to_audio = logit_scale * (text_embeds @ all_audio.t())
        return (F.cross_entropy(audio_to_text, labels) + F.cross_entropy(text_to_audio, labels)) / 2
