"""One global batch through the model: micro batches, loss, backward, optimizer step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from clap_zero.data.batch import Batch
from clap_zero.data.skip_limit import SkipLimit
from clap_zero.data.stopwatch import STAGES
from clap_zero.data.tally import Tally
from clap_zero.distributed.world import World, peak_memory_bytes
from clap_zero.errors import DivergedError
from clap_zero.objective.figures import MAY_LACK, ObjectiveFigures
from clap_zero.phases import phase
from clap_zero.training.engine import Engine
from clap_zero.training.metrics import LocalFigures, gather_figures
from clap_zero.training.own_time import OwnTime
from clap_zero.training.passes import Passes, PassResult

MOST_WASTED_STEPS = 50
"""Steps in a row without an update after which a run is given up; fp16 needs some to find its loss scale."""


@dataclass(frozen=True)
class StepResult:
    """One optimizer step, the same on every rank except `keys`, `skipped` and `tally`.

    Attributes:
        step: Optimizer step, 1-based.
        epoch: Epoch of its samples, 0-based.
        samples: Pairs seen since the start of the run, over all ranks.
        loss: Mean over the global batch.
        learning_rate: The rate used in this step.
        grad_norm: Norm of all gradients before clipping, None on overflow.
        logit_scale: exp of the stored parameter as used in the forward, 1 to 100.
        logit_bias: The learned bias as used in the forward, None for an objective without one.
        logit_scale_t: exp of LAION's second scale likewise, None for a model without the extra heads.
        objective: What people watch of the objective, by the names of `ObjectiveFigures`; means over the global batch.
        loss_scale: fp16 loss scale after the step, None in other precisions.
        samples_per_second: Pairs per second over all ranks.
        step_time_s: Wall time of the slowest rank, waiting for data included.
        data_wait_s: Longest wait of a rank for its loader.
        peak_memory_bytes: Largest over the ranks.
        num_skipped: Unusable samples that were replaced, over all ranks.
        loader_s: Seconds that all loaders spent on the step's batches, by stage.
        stop_requested: Whether a signal asked some rank to stop.
        keys: Keys of this rank's samples, micro batches in order.
        skipped: Key and reason of this rank's samples that others replaced.
        tally: What this rank's batches were made of.
        own_s: By rank, the seconds of `own_time.OWN_PHASES` without waits for other ranks.
    """

    step: int
    epoch: int
    samples: int
    loss: float
    learning_rate: float
    grad_norm: float | None
    logit_scale: float
    logit_bias: float | None
    logit_scale_t: float | None
    objective: dict[str, float]
    loss_scale: float | None
    samples_per_second: float
    step_time_s: float
    data_wait_s: float
    peak_memory_bytes: int
    num_skipped: int
    loader_s: dict[str, float]
    stop_requested: bool
    keys: tuple[str, ...]
    skipped: tuple[tuple[str, str], ...]
    tally: Tally
    own_s: tuple[tuple[float, ...], ...] = ()


class Stepper:
    """Takes optimizer steps. Owns no counters: the loop says which step it is."""

    def __init__(
        self,
        engine: Engine,
        *,
        passes: Passes,
        batches: Iterator[Batch],
        learning_rate: Callable[[int], float] | None,
        accumulation: int,
        stop_requested: Callable[[], str | None],
        skip_limit: SkipLimit,
        world: World,
    ) -> None:
        """Args:
        engine: The model under DeepSpeed.
        passes: How a global batch goes through the model.
        batches: Endless micro batches of this rank.
        learning_rate: Rate by step; None when the DeepSpeed JSON has a scheduler.
        accumulation: Micro batches per optimizer step.
        stop_requested: Name of the signal that asked this rank to stop, None without one.
        skip_limit: Ends the run where too many samples are unusable.
        world: The ranks.
        """
        self._engine = engine
        self._passes = passes
        self._batches = batches
        self._learning_rate = learning_rate
        self._accumulation = accumulation
        self._world = world
        self._stop_requested = stop_requested
        self._skip_limit = skip_limit
        self._num_wasted = 0
        self._own_time = OwnTime(engine.forward_timer, on_gpu=world.device.type != "cpu")

    def close(self) -> None:
        """End the loader's worker processes."""
        getattr(self._batches, "close", lambda: None)()

    def run(self, step: int, *, samples: int) -> StepResult:
        """Take one optimizer step.

        Collective: all ranks must call.

        Args:
            step: Optimizer step, 1-based.
            samples: Pairs seen before it, over all ranks.

        Raises:
            DivergedError: The loss is not a number, or no step in a row of many could update the weights.
            DataError: Too many samples of the epoch were unusable, over all ranks.
        """
        started = time.perf_counter()
        self._own_time.begin()
        if self._learning_rate is not None:
            self._engine.set_learning_rate(self._learning_rate(step))
        learning_rate = self._engine.learning_rate
        drawn = _Drawn(self._batches, self._accumulation)
        with phase("forward"):  # what is not said to be something else within
            passed = self._passes.run(drawn, step=step)
        with phase("optimizer"):  # a GPU is done with the step only when its figures are here
            numbers = _Numbers.read(passed)
        everyone = self._gather(numbers, drawn, started=started)
        self._own_time.restart()
        result = self._result(
            step, samples=samples, numbers=numbers, drawn=drawn, everyone=everyone, learning_rate=learning_rate
        )
        num_slots = result.samples - samples
        self._skip_limit.see(result.epoch, num_slots=num_slots, num_bad=result.num_skipped, skipped=drawn.skipped)
        self._check_progress(result, updated=passed.updated)
        return result

    def _gather(self, numbers: _Numbers, drawn: _Drawn, *, started: float) -> list[LocalFigures]:
        """The step's figures of all ranks. Collective: all ranks must call."""
        tally = drawn.tally
        mine = LocalFigures(
            loss=numbers.loss,
            step_time_s=time.perf_counter() - started,
            data_wait_s=drawn.wait_s,
            peak_memory_bytes=peak_memory_bytes(self._world.device),
            num_skipped=tally.num_bad,
            stop=float(self._stop_requested() is not None),  # asked now: a launcher waits 30 s, not two steps
            loader_s=tuple(tally.loader_s.get(stage, 0.0) for stage in STAGES),
            objective=numbers.objective,
            own_s=self._own_time.take(),
        )
        return gather_figures(mine, device=self._world.device)

    def _result(
        self,
        step: int,
        *,
        samples: int,
        numbers: _Numbers,
        drawn: _Drawn,
        everyone: list[LocalFigures],
        learning_rate: float,
    ) -> StepResult:
        """What the step came to over all ranks; `samples` were seen before it."""
        num_pairs = len(drawn.keys) * self._world.size
        step_time_s = max(figures.step_time_s for figures in everyone)
        return StepResult(
            step=step,
            epoch=drawn.epoch,
            samples=samples + num_pairs,
            loss=sum(figures.loss for figures in everyone) / len(everyone),
            learning_rate=learning_rate,
            grad_norm=self._engine.grad_norm,
            **numbers.scalars,
            objective=mean_objective([figures.objective for figures in everyone]),
            loss_scale=self._engine.loss_scale,
            samples_per_second=num_pairs / step_time_s,
            step_time_s=step_time_s,
            data_wait_s=max(figures.data_wait_s for figures in everyone),
            peak_memory_bytes=int(max(figures.peak_memory_bytes for figures in everyone)),
            num_skipped=int(sum(figures.num_skipped for figures in everyone)),
            loader_s={stage: sum(figures.loader_s[n] for figures in everyone) for n, stage in enumerate(STAGES)},
            stop_requested=any(figures.stop for figures in everyone),
            keys=tuple(drawn.keys),
            skipped=tuple(drawn.skipped),
            tally=drawn.tally,
            own_s=tuple(figures.own_s for figures in everyone),
        )

    def _check_progress(self, result: StepResult, *, updated: bool) -> None:
        """A run that cannot learn any more ends, on all ranks alike; fp16 may first lower its loss scale."""
        finite = math.isfinite(result.loss)
        self._num_wasted = 0 if updated and finite else self._num_wasted + 1
        advice = (
            "the last complete checkpoint is intact. Lower --train.learning_rate or raise --train.warmup_steps, and "
            "start again in another --run_dir"
        )
        if not finite and self._engine.loss_scale is None:
            raise DivergedError(
                f"step {result.step} has loss {result.loss} (learning rate {result.learning_rate:g}); {advice}"
            )
        if self._num_wasted >= MOST_WASTED_STEPS:
            raise DivergedError(
                f"the gradients of the last {self._num_wasted} steps, up to step {result.step}, were not finite, so no "
                f"weight has moved; {advice}"
            )


@dataclass(frozen=True)
class _Numbers:
    """A `PassResult` on the host.

    Attributes:
        loss: Of this rank.
        scalars: What the model learns beside its weights, by the names of `StepResult`; None where it has none.
        objective: In the order of `ObjectiveFigures`.
    """

    loss: float
    scalars: dict[str, Any]
    objective: tuple[float, ...]

    @classmethod
    def read(cls, passed: PassResult) -> _Numbers:
        """Waits for the device, once."""
        scalars = {name: getattr(passed, name) for name in ("logit_scale", "logit_bias", "logit_scale_t")}
        there = {name: value for name, value in scalars.items() if value is not None}
        loss, *rest = torch.stack([passed.loss, *there.values(), *passed.figures]).tolist()
        numbers = dict(zip(there, rest, strict=False))
        return cls(loss, {name: numbers.get(name) for name in scalars}, tuple(rest[len(there) :]))


def mean_objective(of_ranks: list[tuple[float, ...]]) -> dict[str, float]:
    """Means over ranks by name; of figures that a rank without negatives lacks, over the others."""
    means = {}
    for name, values in zip(ObjectiveFigures._fields, zip(*of_ranks, strict=True), strict=True):
        known = [value for value in values if name not in MAY_LACK or not math.isnan(value)]
        means[name] = sum(known) / len(known) if known else math.nan
    return means


class _Drawn:
    """The micro batches of one step, and what is noted of them on the way.

    Attributes:
        keys: Of the samples, micro batches in order.
        skipped: Key and reason of samples that others replaced.
        tally: What the batches are made of.
        wait_s: Seconds that were waited for them.
        epoch: Epoch of the step's samples, 0-based.
    """

    def __init__(self, batches: Iterator[Batch], count: int) -> None:
        """Args:
        batches: Endless.
        count: Micro batches of the step.
        """
        self._batches, self._left = batches, count
        self.keys: list[str] = []
        self.skipped: list[tuple[str, str]] = []
        self.tally = Tally()
        self.wait_s = 0.0
        self.epoch = 0

    def __iter__(self) -> _Drawn:
        return self

    def __next__(self) -> Batch:
        if self._left == 0:
            raise StopIteration
        self._left -= 1
        before = time.perf_counter()
        with phase("data"):
            batch = next(self._batches)
        self.wait_s += time.perf_counter() - before
        self.keys += batch.keys
        self.skipped += batch.skipped
        self.tally.see(batch)
        self.epoch = batch.position.epoch
        return batch
