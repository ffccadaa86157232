"""The run, from its first step to its last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

from clap_zero.checkpoint.state import TrainState
from clap_zero.data.partition import DataPosition, advance
from clap_zero.distributed.world import World
from clap_zero.phases import phase, set_step
from clap_zero.training.engine import Engine
from clap_zero.training.hooks import Hook
from clap_zero.training.say import say
from clap_zero.training.step import Stepper


class Outcome(Enum):
    """How a run ended."""

    DONE = "done"
    STOPPED = "stopped"


@dataclass(frozen=True)
class Plan:
    """The length of a run.

    Attributes:
        max_steps: Optimizer steps of the whole run.
        steps_per_epoch: Optimizer steps of one epoch.
        num_samples: Pairs of an epoch, the remainder that no step uses included.
        global_batch: Pairs per optimizer step over all ranks and accumulation.
    """

    max_steps: int
    steps_per_epoch: int
    num_samples: int
    global_batch: int


class Trainer:
    """Takes the steps of a run and tells the hooks.

    Attributes:
        engine: The model under DeepSpeed.
        state: Counters after the last finished step.
        plan: The length of the run.
        world: The ranks.
        run_dir: Directory of the run.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        stepper: Stepper,
        hooks: Sequence[Hook],
        state: TrainState,
        plan: Plan,
        world: World,
        run_dir: Path,
        stop_requested: Callable[[], str | None],
    ) -> None:
        """Args:
        engine: The model under DeepSpeed.
        stepper: Takes one optimizer step.
        hooks: Told of each moment, in this order.
        state: Where the run is: step 0, or what a checkpoint holds.
        plan: The length of the run.
        world: The ranks.
        run_dir: Directory of the run.
        stop_requested: Name of the signal that asked this rank to stop, None without one.
        """
        self.engine = engine
        self.state = state
        self.plan = plan
        self.world = world
        self.run_dir = run_dir
        self._stepper = stepper
        self._hooks = list(hooks)
        self._stop_requested = stop_requested

    def fit(self) -> Outcome:
        """Run to the last step, or to a signal.

        Collective: all ranks must call.
        """
        with phase("metrics"):  # what the hooks do, unless they say otherwise
            return self._fit()

    def _fit(self) -> Outcome:
        self.fire("on_start")
        while self.state.step < self.plan.max_steps:
            set_step(self.state.step + 1)
            result = self._stepper.run(self.state.step + 1, samples=self.state.samples)
            position = self._position_after(result.epoch)
            self.state = replace(
                self.state, step=result.step, samples=result.samples, epoch=position.epoch, offset=position.offset
            )
            self.fire("on_step", result)
            if position.epoch != result.epoch:
                self.fire("on_epoch_end", result.epoch)
            if result.stop_requested and self.state.step < self.plan.max_steps:
                self.fire("on_stop", self._stop_requested() or "a signal on another rank")
                return Outcome.STOPPED
        self.fire("on_end")
        return Outcome.DONE

    def close(self) -> None:
        """Let the loader and the hooks put away what they hold; after errors, too. Never raises."""
        closing: list[Callable[[], None]] = [self._stepper.close, *(partial(h.on_close, self) for h in self._hooks)]
        for close in closing:
            try:
                close()
            except Exception as error:  # noqa: BLE001
                # One that fails must not keep the others open, nor hide the error that ended the run.
                say(f"clap_zero: warning: closing failed: {type(error).__name__}: {error}")

    def fire(self, moment: str, *args: Any) -> None:
        """Tell all hooks of a moment, in order."""
        for hook in self._hooks:
            getattr(hook, moment)(self, *args)

    def _position_after(self, epoch: int) -> DataPosition:
        here = DataPosition(epoch=epoch, offset=self.state.offset if self.state.epoch == epoch else 0)
        return advance(here, num_samples=self.plan.num_samples, global_batch=self.plan.global_batch)
