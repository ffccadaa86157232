"""Zero-shot classification: which of the class prompts is nearest to a clip."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from clap_zero.errors import ConfigError, DataError, DivergedError
from clap_zero.evaluation.retrieval import TIE_TOLERANCE

TEMPLATES = ("This is a sound of {label}.",)
"""The template of LAION-AI/CLAP (91.55 % on ESC-50 with laion/clap-htsat-unfused)."""


def class_prompts(labels: Sequence[str], templates: Sequence[str] = TEMPLATES) -> list[str]:
    """All prompts: the first template with every label, then the second, and so on.

    Args:
        labels: Names of the classes; underscores are written as spaces.
        templates: Texts with `{label}` in them.

    Raises:
        ConfigError: A template without `{label}` (every class would have the same prompt), or none at all.
    """
    bad = [template for template in templates if "{label}" not in template]
    if bad or not templates:
        raise ConfigError(f"template {bad[0]!r} lacks {{label}}" if bad else "zero-shot needs at least one template")
    return [template.replace("{label}", label.replace("_", " ")) for template in templates for label in labels]


def class_embeddings(prompt_embeds: Tensor, num_classes: int) -> Tensor:
    """One direction per class: the mean over templates of its prompts' embeddings, normalised again.

    Args:
        prompt_embeds: (templates * classes, d) L2-normalised, in the order of `class_prompts`.
        num_classes: Number of classes.

    Returns:
        (classes, d) L2-normalised.
    """
    assert prompt_embeds.shape[0] % num_classes == 0
    return F.normalize(prompt_embeds.float().unflatten(0, (-1, num_classes)).mean(dim=0), dim=-1)


def zero_shot_accuracy(audio_embeds: Tensor, class_embeds: Tensor, labels: Tensor) -> float:
    """Part of the clips whose own class is nearest.

    A clip whose own class ties with m - 1 others at the top (scores within 1e-6) counts 1/m, so a model that maps
    everything to one point scores chance.

    Args:
        audio_embeds: (n, d) L2-normalised.
        class_embeds: (classes, d) L2-normalised.
        labels: (n,) int64, the class of each clip.

    Returns:
        Fraction, 0 to 1.

    Raises:
        DataError: There are no clips.
        DivergedError: An embedding is not finite.
    """
    if len(audio_embeds) == 0:
        raise DataError("nothing to classify: 0 clips")
    if not (audio_embeds.isfinite().all() and class_embeds.isfinite().all()):
        raise DivergedError("an embedding is not finite: the model has diverged")
    scores = audio_embeds.float() @ class_embeds.float().T
    own = scores.gather(1, labels[:, None])
    beaten = (scores > own + TIE_TOLERANCE).any(dim=1)
    tied = ((scores - own).abs() <= TIE_TOLERANCE).sum(dim=1)
    return float(torch.where(beaten, 0.0, 1.0 / tied).double().mean())
