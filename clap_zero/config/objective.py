"""The objective's keys, and which of their values contradict each other."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from clap_zero.config.section import Section, key

Loss = Literal["softmax", "sigmoid"]
Positives = Literal["off", "mask", "soft"]


class ObjectiveSection(Section):
    """What is minimised, and over which negatives."""

    negatives: Literal["global", "micro", "local"] = key(
        "global",
        "all pairs of a step, with accumulation (global), a micro batch over all ranks (micro) or the rank's (local)",
        "-",
    )
    loss: Loss = key("softmax", "contrast over the batch (softmax), or a question per pair with a learned bias", "-")
    positives: Positives = key(
        "soft",
        "two pairs that share a caption or group are negatives (off), left out (mask), positives (soft)",
        "-",
    )
    label_smoothing: float = key(0.0, "share of the softmax target spread over all candidates", "share", ge=0, lt=1)
    hard_negative_beta: float = key(0.0, "concentration of the weights on hard negatives; 0 is off", "-", ge=0)
    mlp: Literal["auto", "off"] = key(
        "auto", "LAION's MLP loss and second scale, where model.pretrained has the heads (auto), or never (off)", "-"
    )

    @model_validator(mode="after")
    def _check(self) -> ObjectiveSection:
        wrong = contradiction(
            loss=self.loss,
            positives=self.positives,
            label_smoothing=self.label_smoothing,
            hard_negative_beta=self.hard_negative_beta,
        )
        if wrong is not None:
            raise ValueError(wrong)
        return self


def contradiction(*, loss: Loss, positives: Positives, label_smoothing: float, hard_negative_beta: float) -> str | None:
    """What of an objective has no meaning beside the rest of it, in one line with the way out; None if all has."""
    beta, smoothing = hard_negative_beta, label_smoothing
    softmax_only = "is defined for the softmax loss only: set it to 0, or objective.loss to softmax"
    if loss == "sigmoid" and smoothing:
        return f"objective.label_smoothing {smoothing:g} {softmax_only}"
    if loss == "sigmoid" and beta:
        return f"objective.hard_negative_beta {beta:g} {softmax_only}"
    if beta and smoothing:
        return (
            f"objective.hard_negative_beta {beta:g} weights negatives that objective.label_smoothing {smoothing:g} "
            "makes targets: set one of them to 0"
        )
    if beta and positives == "soft":
        return (
            f"objective.hard_negative_beta {beta:g} has no definition for several positives: set it to 0, or "
            "objective.positives to mask"
        )
    return None


def needs_caching(negatives: str, *, accumulation: int) -> bool:
    """Whether a step has more negatives than one pass over a micro batch could see.

    Args:
        negatives: global, micro or local.
        accumulation: Micro batches per optimizer step.
    """
    return negatives == "global" and accumulation > 1


def told_objective(objective: ObjectiveSection, *, micro_batch: int, accumulation: int, world_size: int) -> list[str]:
    """Lines that say which negatives are in force, what they cost, and which variant is minimised.

    Args:
        objective: The keys.
        micro_batch: Pairs per forward and rank.
        accumulation: Micro batches per optimizer step.
        world_size: Ranks.
    """
    whole = micro_batch * accumulation * world_size
    if objective.negatives == "local":
        line = f"the {micro_batch} pairs of a rank's micro batch, of the {whole} of a step: objective.negatives local"
    elif needs_caching(objective.negatives, accumulation=accumulation):
        line = (
            f"all {whole} pairs of a step; its {accumulation} micro batches are embedded twice for that, 4/3 of the "
            "time of --objective.negatives micro"
        )
    elif accumulation == 1:
        line = f"all {whole} pairs of a step, in one pass"
    else:
        line = (
            f"the {micro_batch * world_size} pairs of a micro batch over all ranks, of the {whole} of a step: "
            "objective.negatives micro, 3/4 of the time of all of them (global)"
        )
    variant = f"objective: {objective.loss}; pairs with an equal caption or group: positives {objective.positives}"
    if objective.label_smoothing:
        variant += f"; label smoothing {objective.label_smoothing:g}"
    if objective.hard_negative_beta:
        variant += f"; hard negatives with beta {objective.hard_negative_beta:g}"
    return [f"negatives: {line}", variant]
