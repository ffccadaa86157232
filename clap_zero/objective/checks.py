"""What the objective refuses before it computes."""

from __future__ import annotations

import torch
from torch import Tensor

from clap_zero.distributed.collectives import all_gather
from clap_zero.objective.config import ObjectiveConfig


def check_arguments(
    audio: Tensor, text: Tensor, *, logit_bias: Tensor | None, groups: Tensor | None, config: ObjectiveConfig
) -> None:
    """Raises ValueError where the arguments do not fit together."""
    if audio.dim() != 2 or audio.shape != text.shape or audio.shape[0] == 0:
        raise ValueError(f"clips {tuple(audio.shape)} and captions {tuple(text.shape)} must both be (n, d), n > 0")
    if config.uses_bias != (logit_bias is not None):
        raise ValueError(f"the {config.loss} loss takes {'a' if config.uses_bias else 'no'} logit_bias")
    if config.uses_groups and (groups is None or groups.shape != audio.shape[:1]):
        got = "none" if groups is None else tuple(groups.shape)
        raise ValueError(f"positives {config.positives} needs groups of shape ({audio.shape[0]},), got {got}")


def check_same_number_everywhere(audio: Tensor) -> None:
    """Raises ValueError on all ranks alike, so that none waits for the others.

    Each time and before anything else is gathered: with another number on one rank the next collective would hang.

    Collective: all ranks must call.
    """
    numbers = all_gather(torch.tensor([audio.shape[0]], device=audio.device)).tolist()
    if len(set(numbers)) > 1:
        raise ValueError(f"every rank must bring the same number of pairs; ranks 0 to {len(numbers) - 1}: {numbers}")
