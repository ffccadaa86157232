"""The chunked objective for autograd: gradients are computed in the forward and handed out in the backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from clap_zero.objective.chunked import objective_gradients
from clap_zero.objective.config import ObjectiveConfig
from clap_zero.objective.figures import ObjectiveFigures


def contrastive_objective(
    audio: Tensor,
    text: Tensor,
    logit_scale: Tensor,
    *,
    logit_bias: Tensor | None = None,
    groups: Tensor | None = None,
    config: ObjectiveConfig,
    gather: bool = True,
    chunk: int | None = None,
) -> tuple[Tensor, ObjectiveFigures]:
    """This rank's share of the objective with gradient, and figures without.

    Arguments as in `objective_gradients`. What is multiplied onto the share, such as a loss scale, has to be the same
    on all ranks, since the gradient is that of the sum over ranks. Only first derivatives.

    Returns:
        () fp32 or fp64, in nats; figures of this rank's rows.

    Raises:
        ValueError: As `objective_gradients`.

    Collective in the forward with `gather`: all ranks must call. The backward communicates nothing.
    """
    settings = (groups, config, gather, chunk)
    share, *figures = _Objective.apply(audio, text, logit_scale, logit_bias, settings)
    return share, ObjectiveFigures(*figures)


class _Objective(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, audio: Tensor, text: Tensor, logit_scale: Tensor, logit_bias: Tensor | None, settings: tuple
    ) -> tuple[Tensor, ...]:
        groups, config, gather, chunk = settings
        result = objective_gradients(
            audio,
            text,
            logit_scale=logit_scale,
            logit_bias=logit_bias,
            groups=groups,
            config=config,
            gather=gather,
            chunk=chunk,
        )
        ctx.inputs = [None if t is None else (t.dtype, t.shape) for t in (audio, text, logit_scale, logit_bias)]
        ctx.save_for_backward(result.audio, result.text, result.logit_scale, result.logit_bias)
        ctx.mark_non_differentiable(*result.figures)
        return result.loss, *result.figures

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        gradients = [
            None if g is None or kind is None else (outer[0] * g).to(kind[0]).reshape(kind[1])
            for g, kind in zip(ctx.saved_tensors, ctx.inputs, strict=True)
        ]
        return *gradients, None
