"""What becomes of a job when one of its ranks dies, stops, ends or hangs: real processes in a real gloo group."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clap_zero.testing.pool import _free_port, rank_environment

SCRIPT = Path(__file__).with_name("watched_ranks.py")


class Job:
    """Ranks that were started by hand, as a launcher's children.

    Attributes:
        codes: Exit code of each rank.
        texts: What each rank printed.
        ended_s: Seconds from the moment at which all were ready to the end of each.
    """

    def __init__(self, scene: str, folder: Path, *, size: int, at_most_s: float, suspend_s: float = 0) -> None:
        root, port = str(SCRIPT.parents[2]), _free_port()
        processes = []
        for rank in range(size):
            environment = rank_environment(rank, size, port) | {"PYTHONPATH": root}
            with (folder / f"log{rank}").open("w") as log:
                command = [sys.executable, str(SCRIPT), scene, str(folder)]
                processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        try:
            began = time.monotonic()
            while not all((folder / f"ready{rank}").exists() for rank in range(size)):
                assert time.monotonic() - began < 120, self._read(folder, size)
                time.sleep(0.05)
            if suspend_s:
                _suspend([process.pid for process in processes], suspend_s)
            began = time.monotonic()
            ends: dict[int, float] = {}
            while len(ends) < size and time.monotonic() - began < at_most_s:
                for rank, process in enumerate(processes):
                    if rank not in ends and process.poll() is not None:
                        ends[rank] = time.monotonic() - began
                time.sleep(0.02)
            self.texts = self._read(folder, size)
            assert len(ends) == size, (ends, self.texts)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        self.codes = [process.returncode for process in processes]
        self.ended_s = [ends[rank] for rank in range(size)]

    @staticmethod
    def _read(folder: Path, size: int) -> list[str]:
        return [(folder / f"log{rank}").read_text() for rank in range(size)]


def _suspend(pids: list[int], seconds: float) -> None:
    """Stops processes and their children for so long, as a scheduler suspends a job."""
    time.sleep(1.5)
    told = [Path(f"/proc/{pid}/task/{pid}/children").read_text().split() for pid in pids]
    everybody = [*pids, *(int(child) for children in told for child in children)]
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in everybody:
            os.kill(pid, number)
        time.sleep(seconds if number == signal.SIGSTOP else 0)


def test_l11_three_ranks_stuck_in_a_collective_leave_when_the_fourth_is_killed(tmp_path: Path) -> None:
    job = Job("kill", tmp_path, size=4, at_most_s=30)
    assert job.codes == [5, 5, 5, -9], job.texts
    assert max(job.ended_s) - job.ended_s[3] < 5
    pattern = r"clap_zero \[rank 0 on \S+\]: error: rank 3 on \S+ died in backward of step 7 without a word: .*intact\n"
    assert re.search(pattern, job.texts[0]), job.texts
    assert job.texts[1] == job.texts[2] == "", "one rank speaks for all"


@pytest.mark.long
def test_a_hang_names_the_rank_in_data_and_leaves_the_stacks_of_all(tmp_path: Path) -> None:
    job = Job("hang", tmp_path, size=3, at_most_s=40)
    assert job.codes == [5, 5, 5], job.texts
    assert re.search(r"the run hangs: no rank has made progress for [34] s \(", job.texts[0]), job.texts[0]
    assert re.search(r"rank 1 on \S+ is behind, in data of step 7", job.texts[0])
    frames = job.texts[0].partition("innermost frames of rank 1:\n")[2]
    assert frames.splitlines()[-1].strip().endswith("in hang"), frames
    stacks = {path.name: path.read_text() for path in (tmp_path / "stacks").iterdir()}
    assert sorted(stacks) == [f"rank0000{rank}.txt" for rank in range(3)]
    assert all("in all_reduce" in stacks[f"rank0000{rank}.txt"] for rank in (0, 2))
    assert "in hang" in stacks["rank00001.txt"] and "in all_reduce" not in stacks["rank00001.txt"]


def test_t14_a_slow_rank_0_outlasts_the_timeout_of_collectives(tmp_path: Path) -> None:
    """Collectives time out after 1 s; rank 0 keeps the other waiting for 3 s."""
    job = Job("late", tmp_path, size=2, at_most_s=60)
    assert job.codes == [0, 0], job.texts
    assert min(job.ended_s) > 2.5


@pytest.mark.long
def test_t14_what_a_patient_wait_spares(tmp_path: Path) -> None:
    job = Job("late_collective", tmp_path, size=2, at_most_s=60)
    assert job.codes[1] == 1 and "rank 1 was not told why: " in job.texts[1], job.texts


@pytest.mark.long
def test_l11_a_rank_that_ends_with_0_while_others_go_on_is_noticed(tmp_path: Path) -> None:
    job = Job("leave", tmp_path, size=2, at_most_s=30)
    assert job.codes == [5, 0], job.texts
    assert re.search(r"rank 1 on \S+ died in backward of step 7 without a word", job.texts[0])


@pytest.mark.long
def test_an_error_is_quoted_by_rank_0_after_its_rank_has_ended(tmp_path: Path) -> None:
    job = Job("fail", tmp_path, size=2, at_most_s=30)
    assert job.codes == [5, 3], job.texts
    assert job.ended_s[1] < job.ended_s[0], "the launcher reports the code of whichever ends first"
    assert re.search(r"rank 1 on \S+ failed in backward of step 7: shard 12 is torn", job.texts[0])


@pytest.mark.long
@pytest.mark.parametrize("scene", ["stop", "stuck_in_c"])
def test_a_rank_that_no_signal_reaches_is_killed(tmp_path: Path, scene: str) -> None:
    job = Job(scene, tmp_path, size=2, at_most_s=30)
    assert job.codes == [5, -9], job.texts
    assert max(job.ended_s) < 10
    assert re.search(r"rank 1 on \S+ has not been heard of for 3 s \(last: backward of step 7\)", job.texts[0])
    assert "does not run for 3 s: stopped, or stuck outside Python; killed" in job.texts[1]
    assert scene == "stop" or "in stuck_in_c" in job.texts[1], "its stacks"


@pytest.mark.long
@pytest.mark.parametrize("scene", ["busy", "broken_watch"])
def test_what_is_no_fault_of_a_rank_ends_nobody(tmp_path: Path, scene: str) -> None:
    """Limit of silence: 3 s. A call into C holds Python's lock for 2 s; the watch of a rank breaks for 5 s."""
    job = Job(scene, tmp_path, size=3, at_most_s=60)
    assert job.codes == [0, 0, 0], job.texts
    assert ("watch each other no longer" in "".join(job.texts)) == (scene == "broken_watch")


@pytest.mark.long
def test_a_job_that_was_suspended_as_a_whole_goes_on(tmp_path: Path) -> None:
    """Ranks and the processes beside them are stopped for twice the limit of silence."""
    job = Job("suspend", tmp_path, size=3, at_most_s=60, suspend_s=6)
    assert job.codes == [0, 0, 0], job.texts
