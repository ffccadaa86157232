"""Retrieval on the held-out pairs while training."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from clap_zero.audio.features import ClapFeatures
from clap_zero.data.batch import EvalBatch
from clap_zero.data.skips import bad_limit
from clap_zero.distributed import collectives
from clap_zero.errors import CheckpointError, DataError
from clap_zero.evaluation.runner import EvalResult, evaluate, mark_best, write_result
from clap_zero.phases import phase
from clap_zero.training.hooks import Hook
from clap_zero.training.loop import Trainer
from clap_zero.training.say import say
from clap_zero.training.step import StepResult


class EvaluateHook(Hook):
    """At step 0, every N steps, and at the end. All ranks take part; rank 0 writes RUN/eval/step-N.json."""

    def __init__(
        self,
        batches: Callable[[], Iterator[EvalBatch]],
        *,
        features: ClapFeatures,
        every_steps: int | None,
        max_bad_fraction: float = 1.0,
    ) -> None:
        """Args:
        batches: Starts one pass over this rank's share of the held-out pairs.
        features: Waveforms to log-mel on the training device.
        every_steps: Optimizer steps between two evaluations, None for start and end only.
        max_bad_fraction: Larger shares of unusable clips, over all ranks, end the run.
        """
        self._batches = batches
        self._features = features
        self._every_steps = every_steps
        self._max_bad_fraction = max_bad_fraction
        self._last_step: int | None = None

    def on_start(self, trainer: Trainer) -> None:
        # Also what a kill took: the checkpoint of a step is written before its evaluation.
        path = trainer.run_dir / "eval" / f"step-{trainer.state.step}.json"
        if self._is_due(trainer.state.step) and not collectives.broadcast_object(path.exists()):
            self._evaluate(trainer)

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        if self._is_due(result.step):
            self._evaluate(trainer)

    def on_end(self, trainer: Trainer) -> None:
        if self._last_step != trainer.state.step:
            self._evaluate(trainer)

    def _is_due(self, step: int) -> bool:
        return step == 0 or (self._every_steps is not None and step % self._every_steps == 0)

    def _evaluate(self, trainer: Trainer) -> None:
        with phase("evaluation"):
            result = evaluate(trainer.engine.deepspeed, self._batches(), self._features, device=trainer.world.device)
            self._check(result, is_main=trainer.world.is_main)
            self._last_step = trainer.state.step
            if trainer.world.is_main:
                try:
                    write_result(trainer.run_dir, trainer.state.step, result)
                    mark_best(trainer.run_dir)
                except (OSError, CheckpointError) as error:
                    say(f"clap_zero: warning: the evaluation is not on record: {error}; training goes on")
            counts = {"num_clips": result.num_clips, "num_captions": result.num_captions}
            trainer.fire("on_evaluate", result.metrics | counts)
            collectives.barrier()  # a patient one: rank 0 has had more to do

    def _check(self, result: EvalResult, *, is_main: bool) -> None:
        """Raises DataError on all ranks where too many clips were unusable; a rank sees too few of them to judge."""
        num_clips = result.num_clips + result.num_skipped
        if result.num_skipped <= bad_limit(num_clips, num_samples=num_clips, max_bad_fraction=self._max_bad_fraction):
            return
        error = DataError(
            f"{result.num_skipped} of {num_clips} held-out clips are unusable, more than data.max_bad_fraction "
            f"{self._max_bad_fraction} allows: see the log for their names, or run `clap-zero check` on data.val"
        )
        error.reported_elsewhere = not is_main
        raise error
