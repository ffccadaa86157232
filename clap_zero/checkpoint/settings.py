"""What of a checkpoint's optimizer the configuration of the run decides, and not the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed import DeepSpeedEngine

from clap_zero.checkpoint.layout import base_optimizer

_MOVING = ("lr", "initial_lr", "step")
"""Numbers of a parameter group that training changes."""
_SCHEDULED = ("betas", "momentum")
"""Those that a schedule of the JSON may change, too."""


@contextmanager
def own_settings(engine: DeepSpeedEngine) -> Iterator[None]:
    """Keeps weight decay, eps, betas and clipping as configured while a checkpoint is loaded within the block.

    torch and DeepSpeed take them from the checkpoint: a run that goes on with others on purpose would not get them.
    """
    moving = _MOVING if engine.lr_scheduler is None else _MOVING + _SCHEDULED
    groups = [
        {key: value for key, value in group.items() if key not in moving and (key == "betas" or is_number(value))}
        for group in base_optimizer(engine).param_groups
    ]
    optimizer: Any = engine.optimizer
    clipping = getattr(optimizer, "clip_grad", None)
    yield
    for group, own in zip(base_optimizer(engine).param_groups, groups, strict=True):
        group.update(own)
    if clipping is not None:
        optimizer.clip_grad = clipping


def is_number(value: Any) -> bool:
    """Whether an entry of a parameter group is a number, and no switch."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
