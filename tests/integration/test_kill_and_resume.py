"""A run that was killed at any moment goes on as if nothing had happened, and nothing of it is left behind."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import psutil
import pytest

from tests.integration.jobs import (
    FAST,
    command,
    job,
    keys,
    kill,
    launch_py,
    ranks,
    read_jsonl,
    run,
    session_processes,
    steps,
    wait_for_step,
    wait_until_gone,
)

pytestmark = pytest.mark.integration

NUM_STEPS = 14


def flags_of(shards: tuple[Path, Path], stage: int) -> list[str]:
    """A run of `stage`; that of stage 3 takes its steps in two passes, and has the sigmoid objective with its bias."""
    cached = ("--train.global_batch_size", "16", "--objective.loss", "sigmoid")
    return [
        *FAST,
        *(cached if stage == 3 else ()),
        *("--data.train", str(shards[0]), "--data.val", str(shards[1]), "--data.log_keys", "keys", "--run_dir", "run"),
        *("--ds.zero_optimization.stage", str(stage), "--train.max_steps", str(NUM_STEPS)),
        *("--checkpoint.every_steps", "3", "--evaluate.every_steps", "5", "--data.workers", "1"),
    ]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, shards: tuple[Path, Path]) -> Callable[[int], Path]:
    """The directory of an uninterrupted run of a stage, made at first use."""

    @lru_cache
    def make(stage: int) -> Path:
        folder = tmp_path_factory.mktemp(f"unbroken{stage}")
        code, output = run(command("deepspeed -m", *flags_of(shards, stage), port=29600 + stage), cwd=folder)
        assert code == 0, output
        return folder

    return make


def kill_everything(session: int) -> None:
    for one in session_processes(session):
        kill(one)


KILLS: dict[str, Callable[[int], None]] = {
    "one rank": lambda session: kill(ranks(session)[1]),
    "launch.py": lambda session: kill(launch_py(session)),
    "deepspeed": lambda session: kill(psutil.Process(session)),
    "everything": kill_everything,
}
CI_CASES = [(3, "launch.py")]
LONG_CASES = [(stage, what) for stage in (2, 3) for what in KILLS if (stage, what) not in CI_CASES]


@pytest.mark.parametrize(
    ("stage", "what"), [*CI_CASES, *(pytest.param(*case, marks=pytest.mark.long) for case in LONG_CASES)]
)
def test_killed_and_started_again(
    tmp_path: Path, shards: tuple[Path, Path], unbroken: Callable[[int], Path], port: int, stage: int, what: str
) -> None:
    expected = unbroken(stage)
    words = command("deepspeed -m", *flags_of(shards, stage), port=port)
    run_dir = tmp_path / "run"
    # A step's line is written before its checkpoint, so only step 4 says that the one of step 3 is whole; where between
    # two checkpoints the kill falls is left to chance, a new moment each time.
    moment = random.SystemRandom().randint(4, NUM_STEPS - 3)
    with job(words, cwd=tmp_path) as process:
        wait_for_step(run_dir, moment, process)
        KILLS[what](process.pid)
        wait_until_gone(process.pid, timeout_s=60)
        left = (run_dir / "metrics.jsonl").read_bytes()
        time.sleep(1.5)
        assert (run_dir / "metrics.jsonl").read_bytes() == left, "an orphan went on writing"
    code, output = run(words, cwd=tmp_path)
    assert code == 0, output
    assert "attempt 2, resumed from" in output
    got, wanted = steps(run_dir), steps(expected / "run")
    assert list(got) == list(wanted) == list(range(1, NUM_STEPS + 1))
    assert keys(tmp_path / "keys") == keys(expected / "keys")
    for step, line in wanted.items():
        assert got[step]["learning_rate"] == line["learning_rate"], f"killed at {moment}, step {step}"
        assert got[step]["loss"] == pytest.approx(line["loss"], rel=1e-6), f"killed at {moment}, step {step}"
    assert {line["attempt"] for line in got.values()} == {1, 2}


def interrupt_everything(session: int) -> None:
    """Ctrl-C in a terminal: every process in front gets it, the `deepspeed` command dies of it at once."""
    os.killpg(session, signal.SIGINT)


STOPS: dict[str, tuple[str, Callable[[int], None]]] = {
    "SIGTERM to one rank": ("torchrun", lambda session: ranks(session)[1].send_signal(signal.SIGTERM)),
    "Ctrl-C": ("deepspeed -m", interrupt_everything),
}


@pytest.mark.parametrize("how", STOPS)
def test_a_signal_stops_all_ranks_with_a_checkpoint(
    tmp_path: Path, shards: tuple[Path, Path], port: int, how: str
) -> None:
    """After a whole step, with 75 on every rank; meanwhile nobody else gets into the directory."""
    launcher, send = STOPS[how]
    flags = flags_of(shards, 2)
    flags[flags.index("--train.max_steps") + 1] = "2000"
    codes = tmp_path / "codes"
    codes.mkdir()
    words = command(launcher, *flags, port=port)
    with job(words, cwd=tmp_path, CLAP_ZERO_EXIT_CODES=str(codes)) as process:
        wait_for_step(tmp_path / "run", 2, process)
        if launcher == "torchrun":
            code, output = run(command("alone", *flags, "--force"), cwd=tmp_path, timeout_s=90)
            assert code == 5 and "in use by another job" in output, output
        send(process.pid)
        wait_until_gone(process.pid, timeout_s=60)
        output, _ = process.communicate(timeout=60)
    assert {path.name: path.read_text().strip() for path in codes.iterdir()} == {"rank0": "75", "rank1": "75"}, output
    events = [line for line in read_jsonl(tmp_path / "run" / "metrics.jsonl") if line.get("event") == "stop"]
    last = max(steps(tmp_path / "run"))
    assert [line["step"] for line in events] == [last], output
    latest = (tmp_path / "run" / "checkpoints" / "latest").read_text().strip()
    assert latest == f"step-{last:08d}", output


@pytest.mark.long
def test_a_changed_configuration_is_refused_with_the_difference(tmp_path: Path, shards: tuple[Path, Path]) -> None:
    flags = [*FAST, "--data.train", str(shards[0]), "--run_dir", "run", "--train.max_steps", "2"]
    assert run(command("alone", *flags), cwd=tmp_path)[0] == 0
    code, output = run(command("alone", *flags, "--train.seed", "1"), cwd=tmp_path)
    assert code == 2 and "train.seed: 0 -> 1" in output and "--force" in output, output
