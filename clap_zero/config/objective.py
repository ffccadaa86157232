"""The objective's keys, and which of their values contradict each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import model_validator

from clap_zero.config.section import Section, key
from clap_zero.errors import ConfigError

if TYPE_CHECKING:
    from clap_zero.config.deepspeed import ResolvedDeepSpeed

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
    hard_negative_beta: float = key(0.0, "concentration of the weights on hard negatives; 0 is off", "-", ge=0, le=100)
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
            f"objective.hard_negative_beta {beta:g} has no definition for several positives, so not beside "
            "objective.positives soft (the default): add --objective.positives mask or off, or set it to 0"
        )
    return None


def needs_caching(negatives: str, *, accumulation: int) -> bool:
    """Whether a step has more negatives than one pass over a micro batch could see.

    Args:
        negatives: global, micro or local.
        accumulation: Micro batches per optimizer step.
    """
    return negatives == "global" and accumulation > 1


def refuse_single_pair(negatives: str, *, micro: int, whole: int, world_size: int) -> None:
    """Raises ConfigError where a pair has no other to be compared with: then nothing is learned.

    Args:
        negatives: global, micro or local.
        micro: Pairs per forward and rank.
        whole: Pairs per optimizer step over all ranks and accumulation.
        world_size: Ranks.
    """
    if whole == 1:
        raise ConfigError(
            "the global batch is one pair, which has nothing to be compared with: set train_micro_batch_size_per_gpu "
            "to 2 or more, or add accumulation or ranks"
        )
    place = {"local": "one rank's micro batch", "micro": "a micro batch over all ranks"}.get(negatives)
    if place is not None and micro * (world_size if negatives == "micro" else 1) == 1:
        others = "global" if negatives == "micro" or world_size == 1 else "micro or global"
        raise ConfigError(
            f"objective.negatives {negatives} compares the pairs of {place}, and that is one pair: nothing would be "
            f"learned. Give --train.micro_batch_size 2 or more, or --objective.negatives {others}"
        )


def told_objective(resolved: ResolvedDeepSpeed, *, world_size: int) -> list[str]:
    """What is minimised over which negatives, and what these cost.

    Args:
        resolved: The run.
        world_size: Ranks.

    Returns:
        Two lines: the negatives in force, and the variant.
    """
    objective = resolved.run.objective
    variant = f"objective: {objective.loss}; pairs with an equal caption or group: positives {objective.positives}"
    if objective.label_smoothing:
        variant += f"; label smoothing {objective.label_smoothing:g}"
    if objective.hard_negative_beta:
        variant += f"; hard negatives with beta {objective.hard_negative_beta:g}"
    return [f"negatives: {_told_negatives(resolved, world_size=world_size)}", variant]


def _told_negatives(resolved: ResolvedDeepSpeed, *, world_size: int) -> str:
    negatives, micro, whole = resolved.run.objective.negatives, resolved.micro_batch, resolved.global_batch
    # A second forward beside forward and backward, and with checkpointing beside the recomputation too.
    times = "5/4" if resolved.activation_checkpointing else "4/3"
    if needs_caching(negatives, accumulation=resolved.accumulation):
        line = (
            f"all {whole} pairs of a step; its {resolved.accumulation} micro batches are embedded twice for that: "
            f"about {times} of the time of --objective.negatives micro, and {resolved.held_bytes / 1e6:.0f} MB a rank "
            "for log-mels"
        )
        gathered = "; ZeRO stage 3 gathers the weights for each embedding" if resolved.stage == 3 else ""
        return line + gathered
    candidates = micro if negatives == "local" else micro * world_size
    if candidates == whole:
        return f"all {whole} pairs of a step, in one pass"
    if negatives == "local":
        return (
            f"the {micro} pairs of a rank's micro batch, of the {whole} of a step: objective.negatives local, one pass "
            "that exchanges no embeddings"
        )
    return (
        f"the {candidates} pairs of a micro batch over all ranks, of the {whole} of a step: objective.negatives micro, "
        f"one pass; all of them (global) would take about {times} of the time"
    )
