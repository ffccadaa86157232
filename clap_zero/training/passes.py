"""How a global batch goes through the model: micro batch by micro batch, or with all its pairs as negatives.

`MicroPasses` takes the loss of each micro batch by itself: negatives are the micro batch over all ranks, or this rank's
part of it. `CachedPasses` is exact for the whole global batch in the memory of one micro batch (gradient caching, Gao
et al. 2021, "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup"): embed all micro batches without
gradient, take one loss and its gradient with respect to the embeddings, then embed each micro batch again and send its
part of that gradient through it. Both passes draw the same dropout and see the same BatchNorm statistics.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from clap_zero.audio.features import ClapFeatures
from clap_zero.data.batch import Batch
from clap_zero.distributed.world import World
from clap_zero.model.clap import ContrastOutput
from clap_zero.objective.figures import ObjectiveFigures, mean_figures
from clap_zero.training.engine import Engine
from clap_zero.training.objective import RunObjective, joined, surrogate
from clap_zero.training.seeding import seed_micro_batch


class Inputs(NamedTuple):
    """What the model takes of a micro batch, and the groups of its pairs.

    Attributes:
        input_features: (b, 1 or 4, frames, mels) log-mel.
        is_longer: (b, 1) bool.
        input_ids: (b, L).
        attention_mask: (b, L).
        groups: (b,) int64, equal for pairs that share a caption.
    """

    input_features: Tensor
    is_longer: Tensor
    input_ids: Tensor
    attention_mask: Tensor
    groups: Tensor


@dataclass(frozen=True)
class PassResult:
    """What came out of a global batch on this rank.

    Attributes:
        loss: () mean over this rank's pairs and both directions, in nats.
        figures: Means over this rank's pairs.
        logit_scale: () as used in the forward.
        logit_bias: () as used in the forward, None for an objective without one.
        logit_scale_t: () as used in the forward, None for a model without LAION's extra heads.
        updated: Whether the weights were updated.
    """

    loss: Tensor
    figures: ObjectiveFigures
    logit_scale: Tensor
    logit_bias: Tensor | None
    logit_scale_t: Tensor | None
    updated: bool


class Forward:
    """Batches to inputs, inputs to embeddings, with the random numbers of their place in the run."""

    def __init__(self, engine: Engine, *, features: ClapFeatures, seed: int, world: World) -> None:
        """Args:
        engine: The model under DeepSpeed.
        features: Waveforms to log-mel on the training device.
        seed: Seed of the run.
        world: The ranks.
        """
        self.engine = engine
        self._features = features
        self._seed = seed
        self._world = world

    def inputs(self, batch: Batch) -> Inputs:
        """What the model takes of a batch, on the training device."""
        batch = batch.to(self._world.device, non_blocking=True)
        input_features, is_longer = self._features(batch.clips)
        return Inputs(input_features, is_longer, batch.input_ids, batch.attention_mask, batch.caption_ids)

    def embed(self, inputs: Inputs, *, step: int, micro_index: int) -> ContrastOutput:
        """The model's output; the same dropout whenever it is called for the same place.

        Collective: all ranks must call.
        """
        seed_micro_batch(seed=self._seed, step=step, micro_index=micro_index, rank=self._world.rank)
        output: ContrastOutput = self.engine(
            input_features=inputs.input_features,
            is_longer=inputs.is_longer,
            input_ids=inputs.input_ids,
            attention_mask=inputs.attention_mask,
        )
        return output


class Passes(Protocol):
    """Takes a global batch through forward, loss, backward and the optimizer's step."""

    def run(self, batches: Iterator[Batch], *, step: int) -> PassResult:
        """Take one optimizer step.

        Collective: all ranks must call.

        Args:
            batches: This rank's micro batches of the step.
            step: Optimizer step, 1-based.

        Returns:
            What came out on this rank.

        Raises:
            DivergedError: As `Engine.step`.
            DataError: As the loader that `batches` come from.
        """
        ...


class MicroPasses:
    """One loss for each micro batch; DeepSpeed averages their gradients."""

    def __init__(self, forward: Forward, *, objective: RunObjective) -> None:
        """Args:
        forward: The model.
        objective: What is minimised.
        """
        self._forward, self._objective = forward, objective

    def run(self, batches: Iterator[Batch], *, step: int) -> PassResult:
        """See `Passes.run`."""
        losses, figures, updated = [], [], False
        for micro_index, batch in enumerate(batches):
            inputs = self._forward.inputs(batch)
            output = self._forward.embed(inputs, step=step, micro_index=micro_index)
            loss, numbers = self._objective.share(output, inputs.groups)
            self._forward.engine.backward(loss)
            updated = self._forward.engine.step()
            losses.append(loss.detach())
            figures.append(numbers)
        return _result(torch.stack(losses).mean(), mean_figures(figures), output, updated=updated)


class CachedPasses:
    """One loss over the whole global batch of all micro batches and ranks."""

    def __init__(self, forward: Forward, *, objective: RunObjective) -> None:
        """Args:
        forward: The model.
        objective: What is minimised.
        """
        self._forward, self._objective = forward, objective

    def run(self, batches: Iterator[Batch], *, step: int) -> PassResult:
        """See `Passes.run`."""
        inputs, output = self._embed_all(batches, step=step)
        groups = torch.cat([micro_batch.groups for micro_batch in inputs])
        loss, gradients, figures = self._objective.gradients(output, groups)
        updated = self._send_back(inputs, gradients, step=step)
        return _result(loss, figures, output, updated=updated)

    @torch.no_grad()
    def _embed_all(self, batches: Iterator[Batch], *, step: int) -> tuple[list[Inputs], ContrastOutput]:
        """First pass. BatchNorm's statistics move as in the second, and are as before afterwards.

        Each micro batch is embedded as soon as it is drawn, so that the loader prepares the next ones meanwhile.
        """
        inputs, outputs = [], []
        with _buffers_restored(self._forward.engine.module):
            for micro_index, batch in enumerate(batches):
                inputs.append(self._forward.inputs(batch))
                outputs.append(self._forward.embed(inputs[-1], step=step, micro_index=micro_index))
        return inputs, joined(outputs)

    def _send_back(self, inputs: list[Inputs], gradients: ContrastOutput, *, step: int) -> bool:
        """Second pass: each micro batch again, with gradient. Empties `inputs`, so that memory falls as it goes."""
        engine, count = self._forward.engine, len(inputs)
        first, updated = 0, False
        for micro_index in range(count):
            output = self._forward.embed(inputs[0], step=step, micro_index=micro_index)
            rows = slice(first, first + len(inputs.pop(0).groups))
            first = rows.stop
            # The gradient is the whole batch's already: nothing is divided by the accumulation.
            engine.backward(surrogate(output, gradients, rows=rows, share=1 / count), divide=False)
            updated = engine.step()
        return updated


def _result(loss: Tensor, figures: ObjectiveFigures, output: ContrastOutput, *, updated: bool) -> PassResult:
    """What a step came to, with the scalars that its last forward used."""
    scalars = (output.logit_scale, output.logit_bias, output.logit_scale_t)
    scale, bias, second = (None if scalar is None else scalar.detach() for scalar in scalars)
    assert scale is not None
    return PassResult(loss, figures, scale, bias, second, updated)


@contextlib.contextmanager
def _buffers_restored(module: nn.Module) -> Iterator[None]:
    """Takes back what happens to the buffers within the block, however it is left."""
    before: list[tuple[Any, Tensor]] = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)
