"""What a user sees, and how fast all is over, when a rank of a real training dies, ends, fails or hangs."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest

from tests.integration.jobs import (
    BIN,
    FAST,
    evaluation,
    job,
    launch_py,
    ranks,
    run,
    session_processes,
    wait_for_step,
    wait_until_gone,
)

pytestmark = [pytest.mark.integration, pytest.mark.long]

ODD_RANK = Path(__file__).with_name("odd_rank.py")


def deepspeed(num_ranks: int, port: int, *program: str) -> list[str]:
    return [str(BIN / "deepspeed"), "--num_gpus", str(num_ranks), "--master_port", str(port), *program]


def flags_of(shards: tuple[Path, Path], *more: str, steps: int = 5000) -> list[str]:
    return [
        *FAST,
        *("--data.train", str(shards[0]), "--run_dir", "run", "--train.max_steps", str(steps)),
        *("--data.workers", "1", "--checkpoint.every_steps", "100000"),
        *more,
    ]


@pytest.mark.parametrize("rank", [3, 0])
def test_l11_three_ranks_stuck_in_a_collective_when_the_fourth_is_killed(
    tmp_path: Path, shards: tuple[Path, Path], port: int, rank: int
) -> None:
    """The stock launcher takes 30 s for each of the three. Loader workers go, too, and the port is free again."""
    words = deepspeed(4, port, "-m", "clap_zero.train", *flags_of(shards))
    with job(words, cwd=tmp_path) as process:
        wait_for_step(tmp_path / "run", 3, process)
        victim = ranks(process.pid)[rank]
        victim.send_signal(signal.SIGSTOP)
        time.sleep(2)  # the others wait for it in a collective by now
        victim.send_signal(signal.SIGKILL)
        took_s = wait_until_gone(process.pid, timeout_s=60)
        output, _ = process.communicate(timeout=60)
    print(f"gone after {took_s:.1f} s")
    assert took_s < 10
    assert process.returncode != 0
    teller = 0 if rank else r"\d"
    told = re.findall(rf"clap_zero \[rank {teller} on \S+\]: error: rank {rank} on \S+ died in \w+ of step \d+", output)
    assert len(told) == 1, output


def test_l11_the_rank_that_is_stopped_for_ever_is_gone_within_a_minute(
    tmp_path: Path, shards: tuple[Path, Path], port: int
) -> None:
    words = deepspeed(2, port, "-m", "clap_zero.train", *flags_of(shards, "--distributed.heartbeat_timeout_s", "8"))
    with job(words, cwd=tmp_path) as process:
        wait_for_step(tmp_path / "run", 3, process)
        ranks(process.pid)[1].send_signal(signal.SIGSTOP)
        took_s = wait_until_gone(process.pid, timeout_s=60)
        output, _ = process.communicate(timeout=60)
    print(f"gone after {took_s:.1f} s")
    assert took_s < 20 and process.returncode != 0
    assert re.search(r"rank 1 on \S+ has not been heard of for 8 s \(last: \w+ of step \d+\)", output), output


@pytest.mark.parametrize(
    ("odd", "code", "said"),
    [
        ("end_with_0@1", 5, r"error: rank 1 on \S+ died in \w+ of step [3-6] without a word"),
        (
            "raise_in_build@1",
            1,
            r"error: rank 1 on \S+ failed in \w+: unexpected ZeroDivisionError in integration/odd_rank\.py",
        ),
    ],
)
def test_l11_a_rank_that_ends_by_itself(
    tmp_path: Path, shards: tuple[Path, Path], port: int, odd: str, code: int, said: str
) -> None:
    words = deepspeed(2, port, str(ODD_RANK), *flags_of(shards, steps=300))
    began = time.monotonic()
    with job(words, cwd=tmp_path, ODD=odd) as process:
        took_s = wait_until_gone(process.pid, timeout_s=150)
        output, _ = process.communicate(timeout=60)
    print(f"over after {took_s + time.monotonic() - began:.1f} s")
    assert process.returncode == code, output
    assert re.search(rf"clap_zero \[rank 0 on \S+\]: {said}", output), output


def test_l11_a_rank_that_sleeps_in_data_is_named_and_the_stacks_of_all_are_there(
    tmp_path: Path, shards: tuple[Path, Path], port: int
) -> None:
    words = deepspeed(2, port, str(ODD_RANK), *flags_of(shards, "--distributed.hang_timeout_s", "8"))
    with job(words, cwd=tmp_path, ODD="sleep_in_data@1") as process:
        wait_for_step(tmp_path / "run", 3, process)
        took_s = wait_until_gone(process.pid, timeout_s=90)
        output, _ = process.communicate(timeout=60)
    print(f"gone after {took_s:.1f} s")
    assert process.returncode == 5, output
    assert re.search(r"the run hangs: no rank has made progress for \d+ s \(", output), output
    assert re.search(r"rank 1 on \S+ is behind, in data of step \d+", output), output
    assert "odd_rank.py" in output.partition("innermost frames of rank 1")[2], output
    stacks = sorted((tmp_path / "run" / "stacks").iterdir())
    assert [path.name for path in stacks] == ["rank00000.txt", "rank00001.txt"]
    assert "odd_rank.py" in stacks[1].read_text()
    assert "leaked" not in output, output


def test_t14_a_slow_rank_0_in_evaluation_outlasts_the_timeout_of_collectives(
    tmp_path: Path, shards: tuple[Path, Path], port: int
) -> None:
    """Collectives may take 6 s; rank 0 alone spends 9 s in each evaluation, twice, and 9 s in each checkpoint."""
    flags = flags_of(shards, "--data.val", str(shards[1]), "--distributed.timeout_s", "6", steps=3)
    words = deepspeed(2, port, str(ODD_RANK), *flags)
    code, output = run(words, cwd=tmp_path, ODD="slow_evaluation@0", ODD_SECONDS="9")
    assert code == 0, output
    assert evaluation(tmp_path / "run", 3)["num_clips"] > 0


def test_killing_the_launcher_leaves_nobody(tmp_path: Path, shards: tuple[Path, Path], port: int) -> None:
    """Not even the workers of the loaders, and whatever the ranks are doing."""
    words = deepspeed(2, port, "-m", "clap_zero.train", *flags_of(shards))
    with job(words, cwd=tmp_path) as process:
        wait_for_step(tmp_path / "run", 3, process)
        assert len(session_processes(process.pid)) >= 6
        ranks(process.pid)[1].send_signal(signal.SIGSTOP)
        launch_py(process.pid).kill()
        took_s = wait_until_gone(process.pid, timeout_s=60)
    print(f"gone after {took_s:.1f} s")
