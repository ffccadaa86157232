"""What passes ask of an engine, without DeepSpeed: gradients add up, and nothing moves."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from clap_zero.distributed.world import World
from clap_zero.objective.config import ObjectiveConfig
from clap_zero.training.objective import RunObjective
from clap_zero.training.passes import Forward, Inputs

PLAIN = RunObjective(ObjectiveConfig(positives="off"))


class PlainEngine:
    """A model whose gradients are those of one process.

    Attributes:
        module: The model.
        divided: Of every backward, whether it was to be divided by the number of micro batches.
    """

    def __init__(self, model: nn.Module, *, accumulation: int) -> None:
        self.module = model
        self.divided: list[bool] = []
        self._accumulation = accumulation

    def __call__(self, **inputs: Any) -> Any:
        return self.module(**inputs)

    def backward(self, loss: Tensor, *, divide: bool = True) -> None:
        self.divided.append(divide)
        (loss / self._accumulation if divide else loss).backward()

    def step(self) -> bool:
        return len(self.divided) % self._accumulation == 0


class Ready(Forward):
    """Takes inputs as they are."""

    def __init__(self, engine: PlainEngine, *, world: World) -> None:
        super().__init__(engine, features=None, seed=5, world=world)  # type: ignore[arg-type]

    def inputs(self, batch: Any) -> Inputs:
        return batch
