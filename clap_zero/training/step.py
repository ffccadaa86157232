"""One global batch through the model: micro batches, loss, backward, optimizer step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from clap_zero.audio.features import ClapFeatures
from clap_zero.data.batch import Batch
from clap_zero.data.skip_limit import SkipLimit
from clap_zero.data.stopwatch import STAGES
from clap_zero.data.tally import Tally
from clap_zero.distributed.world import World, peak_memory_bytes
from clap_zero.errors import DivergedError
from clap_zero.objective.gathered import contrastive_loss
from clap_zero.training.engine import Engine
from clap_zero.training.metrics import LocalFigures, gather_figures
from clap_zero.training.seeding import seed_micro_batch

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
    """

    step: int
    epoch: int
    samples: int
    loss: float
    learning_rate: float
    grad_norm: float | None
    logit_scale: float
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


class Stepper:
    """Takes optimizer steps. Owns no counters: the loop says which step it is."""

    def __init__(
        self,
        engine: Engine,
        *,
        batches: Iterator[Batch],
        features: ClapFeatures,
        learning_rate: Callable[[int], float] | None,
        accumulation: int,
        seed: int,
        stop_requested: Callable[[], str | None],
        skip_limit: SkipLimit,
        world: World,
    ) -> None:
        """Args:
        engine: The model under DeepSpeed.
        batches: Endless micro batches of this rank.
        features: Waveforms to log-mel on the training device.
        learning_rate: Rate by step; None when the DeepSpeed JSON has a scheduler.
        accumulation: Micro batches per optimizer step.
        seed: Seed of the run.
        stop_requested: Name of the signal that asked this rank to stop, None without one.
        skip_limit: Ends the run where too many samples are unusable.
        world: The ranks.
        """
        self._engine = engine
        self._batches = batches
        self._features = features
        self._learning_rate = learning_rate
        self._accumulation = accumulation
        self._seed = seed
        self._world = world
        self._stop_requested = stop_requested
        self._skip_limit = skip_limit
        self._num_wasted = 0

    def close(self) -> None:
        """End the loader's worker processes."""
        close = getattr(self._batches, "close", None)
        if close is not None:
            close()

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
        if self._learning_rate is not None:
            self._engine.set_learning_rate(self._learning_rate(step))
        learning_rate = self._engine.learning_rate
        losses: list[Tensor] = []
        keys: list[str] = []
        skipped: list[tuple[str, str]] = []
        tally = Tally()
        wait_s = 0.0
        updated = False
        for micro_index in range(self._accumulation):
            before = time.perf_counter()
            batch = next(self._batches)
            wait_s += time.perf_counter() - before
            loss, scale, updated = self._micro_batch(batch, step=step, micro_index=micro_index)
            losses.append(loss)
            keys += batch.keys
            skipped += batch.skipped
            tally.see(batch)
        loss_value = sum(float(loss) for loss in losses) / len(losses)
        mine = LocalFigures(
            loss=loss_value,
            step_time_s=time.perf_counter() - started,
            data_wait_s=wait_s,
            peak_memory_bytes=peak_memory_bytes(self._world.device),
            num_skipped=tally.num_bad,
            stop=float(self._stop_requested() is not None),  # asked now: a launcher waits 30 s, not two steps
            loader_s=tuple(tally.loader_s.get(stage, 0.0) for stage in STAGES),
        )
        everyone = gather_figures(mine, device=self._world.device)
        num_pairs = len(keys) * self._world.size
        step_time_s = max(figures.step_time_s for figures in everyone)
        result = StepResult(
            step=step,
            epoch=batch.position.epoch,
            samples=samples + num_pairs,
            loss=sum(figures.loss for figures in everyone) / len(everyone),
            learning_rate=learning_rate,
            grad_norm=self._engine.grad_norm,
            logit_scale=float(scale),
            loss_scale=self._engine.loss_scale,
            samples_per_second=num_pairs / step_time_s,
            step_time_s=step_time_s,
            data_wait_s=max(figures.data_wait_s for figures in everyone),
            peak_memory_bytes=int(max(figures.peak_memory_bytes for figures in everyone)),
            num_skipped=int(sum(figures.num_skipped for figures in everyone)),
            loader_s={stage: sum(figures.loader_s[n] for figures in everyone) for n, stage in enumerate(STAGES)},
            stop_requested=any(figures.stop for figures in everyone),
            keys=tuple(keys),
            skipped=tuple(skipped),
            tally=tally,
        )
        self._skip_limit.see(result.epoch, num_slots=num_pairs, num_bad=result.num_skipped, skipped=skipped)
        self._check_progress(result, updated=updated)
        return result

    def _micro_batch(self, batch: Batch, *, step: int, micro_index: int) -> tuple[Tensor, Tensor, bool]:
        """Forward, loss, backward and DeepSpeed's step of one micro batch.

        Returns:
            This rank's share of the loss () and the logit scale (), detached; whether the weights were updated.
        """
        device = self._world.device
        batch = batch.to(device, non_blocking=True)
        seed_micro_batch(seed=self._seed, step=step, micro_index=micro_index, rank=self._world.rank)
        input_features, is_longer = self._features(batch.clips)
        output = self._engine(
            input_features=input_features,
            is_longer=is_longer,
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask,
        )
        loss = contrastive_loss(output.audio_embeds, output.text_embeds, output.logit_scale)
        self._engine.backward(loss)
        updated = self._engine.step()
        return loss.detach(), output.logit_scale.detach(), updated

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
