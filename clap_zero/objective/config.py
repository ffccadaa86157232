"""Which contrastive objective is trained, and which combinations of its parts mean something."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import get_args

from clap_zero.config.objective import Loss, Positives, contradiction
from clap_zero.errors import ConfigError


@dataclass(frozen=True)
class ObjectiveConfig:
    """The objective of a run. `clap_zero.objective.reference` defines every variant in slow, obvious code.

    Attributes:
        loss: softmax, Radford et al. 2021, "Learning Transferable Visual Models From Natural Language Supervision";
            or sigmoid, Zhai et al. 2023, "Sigmoid Loss for Language Image Pre-Training", with a learned bias.
        positives: What becomes of two pairs of the batch that share a caption. off: each is a negative of the other;
            mask: neither positive nor negative; soft: both are positives. Softmax then shares the target equally among
            all positives (Yang et al. 2022, "Unified Contrastive Learning in Image-Text-Label Space"); sigmoid, where
            every cell is a question of its own, labels every one of them +1.
        label_smoothing: Share of the softmax target that is spread equally over all candidates, the positives
            included (Szegedy et al. 2016, "Rethinking the Inception Architecture for Computer Vision").
        hard_negative_beta: Concentration beta of the weights on hard negatives; 0 is off. Robinson et al. 2021,
            "Contrastive Learning with Hard Negative Samples", without its debiasing, and with alpha = 1 the HN-NCE of
            Radenovic et al. 2023, "Filtering, Distillation, and Hard Negatives for Vision-Language Pre-Training".
    """

    loss: Loss = "softmax"
    positives: Positives = "off"
    label_smoothing: float = 0.0
    hard_negative_beta: float = 0.0

    def __post_init__(self) -> None:
        """Raises:
        ConfigError: A value out of range, or two that contradict each other.
        """
        for name, value, known in (("loss", self.loss, Loss), ("positives", self.positives, Positives)):
            if value not in get_args(known):
                raise ConfigError(f"objective.{name} {value}: must be one of {', '.join(get_args(known))}")
        if not 0 <= self.label_smoothing < 1:
            raise ConfigError(f"objective.label_smoothing {self.label_smoothing:g}: must be at least 0 and below 1")
        if not (self.hard_negative_beta >= 0 and math.isfinite(self.hard_negative_beta)):
            raise ConfigError(f"objective.hard_negative_beta {self.hard_negative_beta:g}: must be 0 (off) or positive")
        wrong = contradiction(
            loss=self.loss,
            positives=self.positives,
            label_smoothing=self.label_smoothing,
            hard_negative_beta=self.hard_negative_beta,
        )
        if wrong is not None:
            raise ConfigError(wrong)

    @property
    def uses_groups(self) -> bool:
        """Whether it matters which pairs share a caption."""
        return self.positives != "off"

    @property
    def uses_bias(self) -> bool:
        """Whether the objective has a learned bias."""
        return self.loss == "sigmoid"
