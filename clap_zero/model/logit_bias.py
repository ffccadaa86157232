"""The learned bias of the sigmoid objective: a parameter while it is trained, a number in config.json otherwise.

Hugging Face's ClapModel has no place for it among its weights, and loads any config.json with keys of its own beside
those that it knows.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import ClapConfig

from clap_zero.errors import CheckpointError
from clap_zero.model.initial import whole

PARAMETER = "logit_bias"
CONFIG_KEY = "clap_zero_logit_bias"
INITIAL_BIAS, INITIAL_SCALE = -10.0, 10.0
"""Where training from scratch starts, as in Zhai et al. 2023, "Sigmoid Loss for Language Image Pre-Training", section
3.2."""


def take_bias(config: ClapConfig) -> float | None:
    """The bias that a configuration holds, taken out of it; None without one.

    Raises:
        CheckpointError: It is no finite number.
    """
    bias = vars(config).pop(CONFIG_KEY, None)
    if bias is None:
        return None
    if isinstance(bias, bool) or not isinstance(bias, int | float) or not math.isfinite(bias):
        raise CheckpointError(f"config.json: {CONFIG_KEY} is {bias!r}, not a number")
    return float(bias)


def told_bias(config: ClapConfig, *, wanted: bool) -> str | None:
    """What becomes of the bias where weights and objective do not agree about it; None where they do.

    Args:
        config: Beside the weights that training starts from.
        wanted: Whether the objective has a bias.
    """
    there = vars(config).get(CONFIG_KEY)
    if wanted and there is None:
        return (
            f"objective.loss sigmoid: the weights have no bias of it, so it starts at {INITIAL_BIAS:g}; the scale "
            "starts at theirs"
        )
    if there is not None and not wanted:
        return (
            f"warning: the weights hold a bias of {there:g} that was learned with objective.loss sigmoid, and softmax "
            "has none: this run and its checkpoints go without it; --objective.loss sigmoid goes on with it"
        )
    return None


def make_bias(value: float = INITIAL_BIAS) -> nn.Parameter:
    """The parameter, of shape (1,): DeepSpeed cannot train a 0-dimensional one."""
    return nn.Parameter(torch.full((1,), value))


@torch.no_grad()
def fill_bias(model: nn.Module, value: float) -> None:
    """Sets the parameter of a model that has one.

    Collective at ZeRO stage 3: all ranks must call.
    """
    bias: Any = getattr(model, PARAMETER)
    if bias is None:
        return
    with whole([bias]) if hasattr(bias, "ds_id") else contextlib.nullcontext():
        bias.fill_(value)  # at stage 3 rank 0's counts


def as_number(bias: Tensor | None) -> Tensor | None:
    """() fp32 or wider of the parameter; a copy, since the parameter's memory is updated, or at stage 3 given away."""
    return None if bias is None else bias.to(torch.promote_types(bias.dtype, torch.float32)).reshape(()).clone()
