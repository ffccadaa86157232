"""Which contrastive objective is trained."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

from clap_zero.config.objective import Loss, ObjectiveSection, Positives, contradiction

DEFAULTS = ObjectiveSection()


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

    loss: Loss = DEFAULTS.loss
    positives: Positives = DEFAULTS.positives
    label_smoothing: float = DEFAULTS.label_smoothing
    hard_negative_beta: float = DEFAULTS.hard_negative_beta

    def __post_init__(self) -> None:
        assert contradiction(**asdict(self)) is None, contradiction(**asdict(self))

    @classmethod
    def of(cls, section: ObjectiveSection) -> ObjectiveConfig:
        """What a run config asks for; its ranges, choices and contradictions are checked there."""
        return cls(**{own.name: getattr(section, own.name) for own in fields(cls)})

    @property
    def uses_groups(self) -> bool:
        """Whether it matters which pairs share a caption."""
        return self.positives != "off"

    @property
    def uses_bias(self) -> bool:
        """Whether the objective has a learned bias."""
        return self.loss == "sigmoid"
