"""Initial weights that depend on the seed and the geometry only: not on stage, world size, device or dtype."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from clap_zero.distributed.collectives import rank_and_size


@torch.no_grad()
def initialise_weights(model: PreTrainedModel, *, seed: int) -> None:
    """Draws a model's weights as its torch and transformers classes define them, one generator for each module.

    The values are drawn in fp32 on the CPU from a generator seeded by (seed, module name), then written to wherever
    the parameter lives. At ZeRO stage 3 one module is gathered at a time, and rank 0's values count.

    Args:
        model: With any values in its parameters; partitioned or not.
        seed: Any integer.

    Collective at ZeRO stage 3: all ranks must call.
    """
    rank, _ = rank_and_size()
    for name, module, owner in _children_first(model, name="", owner=model):
        parameters = list(module.parameters(recurse=False))
        # transformers initialises some modules' children from the parent (the text embeddings).
        for child in module.children():
            if not isinstance(child, PreTrainedModel):
                parameters += child.parameters(recurse=False)
        if not parameters:
            continue
        partitioned = hasattr(parameters[0], "ds_id")
        with whole(parameters) if partitioned else contextlib.nullcontext():
            if rank == 0 or not partitioned:
                _draw(module, owner, parameters=parameters, generator_seed=_seed_of(seed, name))


def whole(parameters: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
    """Partitioned parameters as whole tensors within the block; what rank 0 writes into them counts.

    Collective: all ranks must call.
    """
    import deepspeed  # here: a model that is not partitioned needs none of it

    return deepspeed.zero.GatheredParameters(parameters, modifier_rank=0)


def _draw(
    module: nn.Module, owner: PreTrainedModel, *, parameters: Sequence[nn.Parameter], generator_seed: int
) -> None:
    """Runs the module's own initialisation and its model's on copies in fp32 on the CPU, and writes them back."""
    homes = [parameter.data for parameter in parameters]
    for parameter, home in zip(parameters, homes, strict=True):
        parameter.data = home.to(device="cpu", dtype=torch.float32, copy=True)
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed: that would reseed the accelerators, too.
        torch.random.default_generator.manual_seed(generator_seed)
        reset = getattr(module, "reset_parameters", None)
        if callable(reset):
            reset()
        owner._init_weights(module)
    for parameter, home in zip(parameters, homes, strict=True):
        home.copy_(parameter.data)
        parameter.data = home


def _children_first(
    module: nn.Module, *, name: str, owner: PreTrainedModel
) -> Iterator[tuple[str, nn.Module, PreTrainedModel]]:
    """All modules with their name and the model whose configuration initialises them, in transformers' order."""
    for child_name, child in module.named_children():
        child_owner = child if isinstance(child, PreTrainedModel) else owner
        yield from _children_first(child, name=f"{name}.{child_name}".lstrip("."), owner=child_owner)
    yield name, module, owner


def _seed_of(seed: int, name: str) -> int:
    """63 bits out of the run's seed and a module's name, the same on every machine."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
