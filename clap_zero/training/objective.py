"""The objective of a run on what the model gives: one call for one pass, one for cached passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clap_zero.model.clap import ContrastOutput
from clap_zero.objective.autograd import contrastive_objective
from clap_zero.objective.chunked import objective_gradients
from clap_zero.objective.config import ObjectiveConfig
from clap_zero.objective.figures import ObjectiveFigures
from clap_zero.objective.mlp import TwoHeads, mlp_gradients, mlp_objective


@dataclass(frozen=True)
class RunObjective:
    """What a run minimises: for a model with LAION's extra heads its MLP loss, else one contrast of clips and captions.

    Attributes:
        config: Loss and variants.
        gather: Whether the pairs of all ranks are candidates; otherwise those of this rank.
    """

    config: ObjectiveConfig
    gather: bool = True

    def share(self, output: ContrastOutput, groups: Tensor) -> tuple[Tensor, ObjectiveFigures]:
        """This rank's share of the loss, () with gradient, and figures.

        Args:
            output: Of a forward over this rank's n pairs.
            groups: (n,) int64, equal for pairs that share a caption.

        Collective in the forward with `gather`: all ranks must call.
        """
        assert output.audio_embeds is not None and output.text_embeds is not None, "training has both sides"
        heads = _heads(output)
        if heads is not None:
            return mlp_objective(heads, groups=groups, config=self.config, gather=self.gather)
        return contrastive_objective(
            output.audio_embeds,
            output.text_embeds,
            output.logit_scale,
            logit_bias=output.logit_bias,
            groups=groups,
            config=self.config,
            gather=self.gather,
        )

    def gradients(self, output: ContrastOutput, groups: Tensor) -> tuple[Tensor, ContrastOutput, ObjectiveFigures]:
        """This rank's share of the loss, its gradient in the places of what it belongs to, and figures.

        Args:
            output: Of forwards over this rank's n pairs, without gradient.
            groups: (n,) int64.

        Collective with `gather`: all ranks must call.
        """
        assert output.audio_embeds is not None and output.text_embeds is not None, "training has both sides"
        heads = _heads(output)
        if heads is not None:
            loss, parts, figures = mlp_gradients(heads, groups=groups, config=self.config, gather=self.gather)
            return loss, _output(parts), figures
        result = objective_gradients(
            output.audio_embeds,
            output.text_embeds,
            logit_scale=output.logit_scale,
            logit_bias=output.logit_bias,
            groups=groups,
            config=self.config,
            gather=self.gather,
        )
        gradients = ContrastOutput(result.audio, result.text, result.logit_scale, result.logit_bias)
        return result.loss, gradients, result.figures


def _heads(output: ContrastOutput) -> TwoHeads | None:
    """What LAION's objective takes, None of a model without the heads."""
    if output.audio_mlp is None:
        return None
    assert output.audio_embeds is not None and output.text_embeds is not None
    assert output.text_mlp is not None and output.logit_scale_t is not None
    return TwoHeads(
        audio=output.audio_embeds,
        text=output.text_embeds,
        audio_mlp=output.audio_mlp,
        text_mlp=output.text_mlp,
        logit_scale_a=output.logit_scale,
        logit_scale_t=output.logit_scale_t,
    )


def _output(heads: TwoHeads) -> ContrastOutput:
    """The same as a model's output."""
    return ContrastOutput(
        heads.audio,
        heads.text,
        heads.logit_scale_a,
        audio_mlp=heads.audio_mlp,
        text_mlp=heads.text_mlp,
        logit_scale_t=heads.logit_scale_t,
    )


def joined(outputs: list[ContrastOutput]) -> ContrastOutput:
    """The outputs of several micro batches as that of one: rows in order, scalars of the last."""

    def column(values: tuple[Any, ...]) -> Any:
        return values[-1] if values[-1] is None or values[-1].dim() == 0 else torch.cat(values)

    return ContrastOutput(*(column(values) for values in zip(*outputs, strict=True)))


def surrogate(output: ContrastOutput, gradients: ContrastOutput, *, rows: slice, share: float) -> Tensor:
    """A () whose gradient is the chain rule: output times the gradient with respect to it, summed.

    Args:
        output: Of a forward with gradient, over some of the pairs.
        gradients: Of all pairs.
        rows: Which of them `output` is of.
        share: Part of the scalars' gradients that this forward passes on.
    """
    parts = []
    for value, gradient in zip(output, gradients, strict=True):
        if value is not None and gradient is not None:
            parts.append(value * (gradient * share) if value.dim() == 0 else (value * gradient[rows]).sum())
    return torch.stack(parts).sum()
