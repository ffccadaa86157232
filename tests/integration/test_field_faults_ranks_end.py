"""One rank of a job ends before its time: all end, the exit code says so, and the last lines say who, where and why."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from clap_zero.training.run_directory import RunLock
from tests.integration.jobs import BIN, FAST, job, session_processes, steps, wait_for_step, wait_until_gone
from tests.processes import command_of, words_of

pytestmark = pytest.mark.integration

FAULTY = Path(__file__).with_name("faulty.py")
HOST = socket.gethostname()
ALL_GONE_S = 60.0


@contextmanager
def faulty_job(fault: str, rank: int, folder: Path, shards: tuple[Path, Path], port: int, *flags: str) -> Iterator:
    """A job of two ranks under `deepspeed`, one of them with a fault."""
    words = [str(BIN / "deepspeed"), "--num_gpus", "2", "--master_port", str(port), str(FAULTY), fault, str(rank)]
    words += [*FAST, "--data.train", str(shards[0]), "--run_dir", "run", "--wandb.mode", "disabled", *flags]
    root = str(Path(__file__).resolve().parents[2])
    with job(words, cwd=folder, PYTHONPATH=root) as process:
        yield process


def ranks_of(session: int) -> dict[int, psutil.Process]:
    """The training processes, but not the fork servers and workers that they have started."""
    found = [one for one in session_processes(session) if {str(FAULTY), "-u"} <= set(words_of(one))]
    return {int(one.environ()["RANK"]): one for one in found if "deepspeed" not in " ".join(words_of(one)[:4])}


def assert_all_over(process, folder: Path, port: int, *, since: float) -> str:
    """Everything is gone soon, the exit code is an error's, and nothing is held: the output."""
    wait_until_gone(process.pid, timeout_s=ALL_GONE_S)
    gone_s = time.monotonic() - since
    output = process.stdout.read()  # not communicate, which `job` does once more
    process.wait()
    assert gone_s < ALL_GONE_S, output
    assert process.returncode not in (0, None), output
    with socket.create_server(("127.0.0.1", port)):
        pass
    lock = RunLock(folder / "run")
    lock.acquire_alone(wait_s=0)
    lock.release()
    return output


def clap_zero_lines(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("clap_zero ")]


def test_l11_an_exception_while_one_rank_builds_its_model_ends_all(tmp_path, shards, port) -> None:
    with faulty_job("build", 1, tmp_path, shards, port, "--train.max_steps", "5") as process:
        wait_until_said(process, tmp_path)
        output = assert_all_over(process, tmp_path, port, since=time.monotonic())
    assert "RuntimeError: no such layer" in output
    line = f"clap_zero [rank 1 on {HOST}, model]: error: unexpected RuntimeError in "
    assert any(one.startswith(line) and one.endswith("no such layer") for one in clap_zero_lines(output)), output


def wait_until_said(process, folder: Path) -> None:
    """Until the ranks have met and the run directory is there: the fault comes right after."""
    deadline = time.monotonic() + 120
    while not (folder / "run" / ".lock").exists():
        assert time.monotonic() < deadline and process.poll() is None, process.communicate()[0]
        time.sleep(0.05)


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "rank", "phase", "said"),
    [
        ("exit", 0, "forward of step 3", r"something called sys.exit\(3\) in integration/faulty.py:\d+"),
        ("memory", 1, "optimizer of step 3", "out of memory on the host, 4194304.00 GiB more were asked for, at most "),
    ],
)
def test_l11_a_rank_that_ends_itself_ends_all(tmp_path, shards, port, fault, rank, phase, said) -> None:
    with faulty_job(fault, rank, tmp_path, shards, port, "--train.max_steps", "500") as process:
        wait_for_step(tmp_path / "run", 2, process)
        output = assert_all_over(process, tmp_path, port, since=time.monotonic())
    pattern = re.compile(rf"clap_zero \[rank {rank} on {HOST}, {phase}\]: error: {said}")
    assert any(pattern.match(line) for line in clap_zero_lines(output)), output


@pytest.mark.long
def test_l11_a_killed_rank_ends_all_and_is_named(tmp_path, shards, port) -> None:
    with faulty_job("none", 0, tmp_path, shards, port, "--train.max_steps", "500") as process:
        wait_for_step(tmp_path / "run", 3, process)
        ranks_of(process.pid)[1].kill()
        output = assert_all_over(process, tmp_path, port, since=time.monotonic())
    assert re.search(rf"rank 1 on {HOST} .*(data|forward|backward|optimizer|metrics) of step \d+", output), output


@pytest.mark.long
def test_l11_a_data_worker_that_is_killed_for_memory_ends_all_and_is_named(tmp_path, shards, port) -> None:
    flags = ("--train.max_steps", "500", "--data.workers", "1")
    with faulty_job("none", 0, tmp_path, shards, port, *flags) as process:
        wait_for_step(tmp_path / "run", 3, process)
        servers = [one for one in ranks_of(process.pid)[1].children() if "forkserver" in command_of(one)]
        worker = servers[0].children()[0]
        worker.kill()
        output = assert_all_over(process, tmp_path, port, since=time.monotonic())
    line = (
        rf"clap_zero \[rank 1 on {HOST}, data of step \d+\]: error: the data loader of rank 1 failed: worker 0 "
        rf"\(process {worker.pid}\): killed by SIGKILL, .*: lower data.workers"
    )
    assert re.search(line, output), output


@pytest.mark.long
def test_the_rank_that_holds_the_others_back_is_named(tmp_path, shards, port) -> None:
    with faulty_job("slow", 1, tmp_path, shards, port, "--train.max_steps", "26") as process:
        output = process.stdout.read()
        process.wait()
        assert process.returncode == 0, output
    told = [line for line in output.splitlines() if "holds the others back" in line]
    assert len(told) == 1 and told[0].startswith(f"rank 1 on {HOST} holds") and "most of it in forward" in told[0], (
        output
    )
    last = steps(tmp_path / "run")[26]
    assert last["slowest_rank"] == 1 and last["slowest_rank_share"] > 0.2
