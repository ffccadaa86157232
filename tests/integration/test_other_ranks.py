"""A run that was killed goes on with other ranks, or at another ZeRO stage, as the run that it would have been."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from tests.distributed.test_other_ranks import keys_of_steps
from tests.integration.jobs import (
    FAST,
    command,
    job,
    kill,
    run,
    session_processes,
    steps,
    wait_for_step,
    wait_until_gone,
)

pytestmark = [pytest.mark.integration, pytest.mark.long]

NUM_STEPS, BATCH, STEPS_PER_EPOCH = 14, 16, 2


def words_of(shards: tuple[Path, Path], *, ranks: int, stage: int, port: int) -> list[str]:
    words = command(
        "deepspeed -m",
        *FAST,
        *("--data.train", str(shards[0]), "--data.val", str(shards[1]), "--data.log_keys", "keys", "--run_dir", "run"),
        *("--ds.zero_optimization.stage", str(stage), "--train.max_steps", str(NUM_STEPS), "--data.workers", "1"),
        *("--train.global_batch_size", str(BATCH), "--model.dropout", "0", "--model.batch_norm", "local"),
        *("--checkpoint.every_steps", "3", "--evaluate.every_steps", "5", "--ds.optimizer.params.eps", "1e-4"),
        port=port,
    )
    words[words.index("--num_gpus") + 1] = str(ranks)
    return words


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, shards: tuple[Path, Path]) -> Path:
    """The directory of an uninterrupted run of two ranks at stage 2."""
    folder = tmp_path_factory.mktemp("unbroken")
    code, output = run(words_of(shards, ranks=2, stage=2, port=29610), cwd=folder)
    assert code == 0, output
    return folder


@pytest.mark.parametrize(("ranks", "stage"), [(1, 2), (4, 2), (2, 3), (4, 0)])
def test_two_ranks_at_stage_2_are_killed_and_go_on(
    tmp_path: Path, shards: tuple[Path, Path], unbroken: Path, port: int, ranks: int, stage: int
) -> None:
    # Step 4 says that the checkpoint of step 3 is whole; where between two of them the kill falls is left to chance.
    moment = random.SystemRandom().randint(4, NUM_STEPS - 3)
    with job(words_of(shards, ranks=2, stage=2, port=port), cwd=tmp_path) as process:
        wait_for_step(tmp_path / "run", moment, process)
        for one in session_processes(process.pid):
            kill(one)
        wait_until_gone(process.pid, timeout_s=60)
    code, output = run(words_of(shards, ranks=ranks, stage=stage, port=port), cwd=tmp_path)
    assert code == 0, output
    here = f"{ranks} rank{'s' * (ranks > 1)}, ZeRO stage {stage}, fp32"
    assert f"its optimizer state is converted from 2 ranks, ZeRO stage 2, fp32 to {here}" in output
    assert ("the mean of 2 ranks' BatchNorm statistics" in output) == (ranks != 2)
    got, wanted = steps(tmp_path / "run"), steps(unbroken / "run")
    assert list(got) == list(wanted) == list(range(1, NUM_STEPS + 1))
    assert {line["attempt"] for line in got.values()} == {1, 2}
    for step, line in wanted.items():
        assert got[step]["learning_rate"] == line["learning_rate"], f"killed at {moment}, step {step}"
        assert got[step]["loss"] == pytest.approx(line["loss"], rel=1e-5), f"killed at {moment}, step {step}"
    keys, expected = keys_of_steps(tmp_path / "keys"), keys_of_steps(unbroken / "keys")
    assert {step: sorted(found) for step, found in keys.items()} == {step: sorted(f) for step, f in expected.items()}
    for first in range(1, NUM_STEPS, STEPS_PER_EPOCH):
        seen = Counter(key for step in range(first, first + STEPS_PER_EPOCH) for key in keys[step])
        assert set(seen.values()) == {1} and len(seen) == BATCH * STEPS_PER_EPOCH
