"""The training program with one thing made odd on one rank: `odd_rank.py FLAGS`, the thing in ODD as `WHAT@RANK`."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from clap_zero.phases import phase
from clap_zero.train import run_and_exit

SLOW_S = float(os.environ.get("ODD_SECONDS", "0"))


def slow_evaluation() -> None:
    """What rank 0 alone does in an evaluation, and its writing, take SLOW_S each; so does its share of a checkpoint."""
    from clap_zero.checkpoint.store import CheckpointStore
    from clap_zero.evaluation import runner
    from clap_zero.hooks import evaluate

    runner._rank_all = slowly(runner._rank_all)
    evaluate.write_result = slowly(evaluate.write_result)
    CheckpointStore.prune = slowly(CheckpointStore.prune)


def sleep_in_data() -> None:
    """The 20th batch never comes."""
    from clap_zero.training import step

    draw, count = step._Drawn.__next__, iter(range(10**6))

    def drawn(self: Any) -> Any:
        batch = draw(self)
        if next(count) == 20:
            with phase("data"):
                time.sleep(10_000)
        return batch

    step._Drawn.__next__ = drawn


def raise_in_build() -> None:
    """Something that nobody foresaw, while the model is built."""
    from clap_zero.training import engine

    def broken(*args: Any, **kwargs: Any) -> None:
        raise ZeroDivisionError("a fault of the test")

    engine.Engine.__init__ = broken


def end_with_0() -> None:
    """The process is gone after its 5th step, and says that all is well."""
    from clap_zero.training import step

    run = step.Stepper.run

    def ran(self: Any, number: int, **rest: Any) -> Any:
        if number == 6:
            os._exit(0)
        return run(self, number, **rest)

    step.Stepper.run = ran


def slowly(function: Any) -> Any:
    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(SLOW_S)
        return function(*args, **kwargs)

    return slow


what, _, rank = os.environ["ODD"].partition("@")
if os.environ["RANK"] == rank:
    {odd.__name__: odd for odd in (slow_evaluation, sleep_in_data, raise_in_build, end_with_0)}[what]()
run_and_exit()
