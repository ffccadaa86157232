"""What the data of an epoch were: skipped samples one by one, and sums over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from clap_zero.data.tally import Tally
from clap_zero.distributed import collectives
from clap_zero.hooks.jsonl import LineFile, MetricsHook
from clap_zero.training.hooks import Hook
from clap_zero.training.loop import Trainer
from clap_zero.training.say import say
from clap_zero.training.step import StepResult


class DataHook(Hook):
    """RUN/skipped/rankNNNNN.jsonl, and at the end of each epoch a line in metrics.jsonl and on the console.

    Collective at the ends of epochs and of the run: must be there on all ranks.
    """

    def __init__(
        self,
        directory: Path,
        *,
        rank: int,
        attempt: int,
        set_names: Sequence[str],
        metrics: MetricsHook | None,
        say: Callable[[str], None] = say,
    ) -> None:
        """Args:
        directory: RUN/skipped; made with the first skipped sample.
        rank: Number of this rank.
        attempt: Number of this start of the run.
        set_names: Names of the training data sets, by number.
        metrics: Takes the sums; None on all ranks but 0.
        say: Shows a line to people; used where `metrics` is there.
        """
        self._path = directory / f"rank{rank:05d}.jsonl"
        self._attempt = attempt
        self._set_names = list(set_names)
        self._metrics = metrics
        self._say = say
        self._lines: LineFile | None = None
        self._gave_up = False
        self._tally = Tally()
        self._epoch = self._num_steps = 0

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        self._tally.add(result.tally)
        self._epoch, self._num_steps = result.epoch, self._num_steps + 1
        for key, reason in result.skipped:
            self._write({"epoch": result.epoch, "key": key, "reason": reason, "step": result.step})

    def on_epoch_end(self, trainer: Trainer, epoch: int) -> None:
        self._sum_up(trainer)

    def on_stop(self, trainer: Trainer, reason: str) -> None:
        self._sum_up(trainer)

    def on_end(self, trainer: Trainer) -> None:
        self._sum_up(trainer)

    def on_close(self, trainer: Trainer) -> None:
        if self._metrics is not None and self._num_steps > 0:  # an error: the other ranks cannot be asked any more
            sets = {str(number): count for number, count in self._tally.sets.items()}
            line = describe(self._tally, epoch=self._epoch, sets=sets, directory=self._path.parent, listed=self._listed)
            self._say(f"{line}; those of this rank alone, because the run ended within the epoch")
        if self._lines is not None:
            self._lines.close()

    def _write(self, line: dict[str, object]) -> None:
        if self._lines is None and not self._gave_up:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._lines = LineFile(self._path)
            except OSError as error:
                self._gave_up = True
                say(f"clap_zero: warning: {self._path} cannot be written ({error.strerror}); training goes on")
        if self._lines is not None:
            self._lines.append({**line, "attempt": self._attempt})

    @property
    def _listed(self) -> bool:
        """Whether all skipped samples of this rank stand in its file."""
        return not (self._gave_up or (self._lines is not None and self._lines.lacks_lines))

    def _sum_up(self, trainer: Trainer) -> None:
        """The steps since the last sum: an epoch, or the part of one that this start of the run has seen."""
        num_steps, self._num_steps = self._num_steps, 0
        mine, self._tally = self._tally, Tally()
        if num_steps == 0:
            return
        total, listed = Tally(), True
        for tally, whole in collectives.all_gather_objects((mine, self._listed)):
            total.add(tally)
            listed &= whole
        if self._metrics is None:
            return
        names = dict(enumerate(self._set_names))
        sets = {names.get(number, str(number)): total.sets[number] for number in sorted(total.sets)}
        self._metrics.event(
            "epoch",
            trainer,
            epoch=self._epoch,
            steps=num_steps,
            steps_per_epoch=trainer.plan.steps_per_epoch,
            samples=total.samples,
            skipped=dict(total.skipped.most_common()),
            sets=sets,
            truncated_captions=total.truncated_captions,
            equal_captions=total.equal_captions,
            loader_s={stage: round(seconds, 3) for stage, seconds in total.loader_s.items()},
        )
        self._say(describe(total, epoch=self._epoch, sets=sets, directory=self._path.parent, listed=listed))


def describe(total: Tally, *, epoch: int, sets: dict[str, int], directory: Path, listed: bool = True) -> str:
    """The sums of an epoch as one line."""
    parts = [f"epoch {epoch}: {total.samples} pairs"]
    if len(sets) > 1:
        parts.append("by data set: " + ", ".join(f"{name} {count}" for name, count in sets.items()))
    if total.skipped:
        reasons = ", ".join(f"{reason} {count}" for reason, count in total.skipped.most_common())
        where = f"listed in {directory}" if listed else f"not all of them listed: {directory} could not be written"
        parts.append(f"{total.skipped.total()} skipped ({reasons}), {where}")
    if total.truncated_captions:
        parts.append(f"{total.truncated_captions} captions cut")
    return "; ".join(parts)
