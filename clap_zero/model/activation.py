"""Activation checkpointing of both towers through DeepSpeed, as the JSON's `activation_checkpointing` section says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn
from transformers.models.clap.modeling_clap import ClapAudioLayer, ClapTextLayer


class CheckpointedAudioLayer(ClapAudioLayer):
    """A Swin block that keeps its input only and runs again in the backward.

    transformers checkpoints a whole stage, of which the third alone holds a third of the tower's activations.
    """

    def forward(
        self,
        hidden_states: Tensor,
        input_dimensions: tuple[int, int],
        output_attentions: bool | None = False,
        always_partition: bool | None = False,
    ) -> tuple[Tensor, ...]:
        """As ClapAudioLayer."""
        if not (self.training and torch.is_grad_enabled()) or output_attentions:
            return super().forward(hidden_states, input_dimensions, output_attentions, always_partition)

        def block(x: Tensor) -> Tensor:
            return ClapAudioLayer.forward(self, x, input_dimensions, False, always_partition)[0]

        return (checkpoint(block, hidden_states),)


def checkpoint(function: Callable[..., Tensor], hidden_states: Tensor, *constants: Any) -> Tensor:
    """Runs function(hidden_states, *constants), keeps `hidden_states` only, and runs it again in the backward.

    Unlike DeepSpeed's own function: the second run has the forward's autocast state, and the constants (an attention
    mask, which all layers share) stay out of what partition_activations and cpu_checkpointing take the storage from.
    """
    device_type = hidden_states.device.type
    autocast = torch.is_autocast_enabled(device_type)
    dtype = torch.get_autocast_dtype(device_type)

    def run(x: Tensor) -> Tensor:
        with torch.autocast(device_type, enabled=autocast, dtype=dtype):
            return function(x, *constants)

    return deepspeed.checkpointing.checkpoint(run, hidden_states)


def enable_activation_checkpointing(model: nn.Module, ds_config: Mapping[str, Any]) -> bool:
    """Turns checkpointing on if the DeepSpeed JSON has the section, even an empty one.

    Every block of the audio tower and every layer of the text tower keeps its input only. Dropout and drop path give
    the same values in the second run (DeepSpeed restores the generators). Call before `deepspeed.initialize`.

    Args:
        model: With CLAP's towers in it.
        ds_config: Resolved DeepSpeed JSON.

    Returns:
        Whether it is on.
    """
    if ds_config.get("activation_checkpointing") is None:
        return False
    section = dict(ds_config["activation_checkpointing"])
    deepspeed.checkpointing.configure(
        None,
        partition_activations=section.get("partition_activations", False),
        num_checkpoints=section.get("number_checkpoints"),
        checkpoint_in_cpu=section.get("cpu_checkpointing", False),
        synchronize=section.get("synchronize_checkpoint_boundary", False),
        profile=section.get("profile", False),
    )
    for module in model.modules():
        if type(module) is ClapAudioLayer:
            module.__class__ = CheckpointedAudioLayer
        elif isinstance(module, ClapTextLayer):
            module.gradient_checkpointing = True
            module._gradient_checkpointing_func = checkpoint
    return True
