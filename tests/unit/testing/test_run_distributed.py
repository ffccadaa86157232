"""The harness itself: results, failures, hangs, reuse."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from clap_zero.errors import DataError
from clap_zero.testing import RankError, RankTimeout, run_distributed


@dataclass
class Content:
    """A class of the test module has to travel both ways."""

    value: int


class Unpicklable(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__("two arguments")


def rank_and_pid() -> tuple[int, int]:
    return dist.get_rank(), os.getpid()


def contribute(contents: list[Content]) -> tuple[Content, float, int]:
    own = contents[dist.get_rank()]
    total = torch.tensor([float(own.value)])
    dist.all_reduce(total)
    return own, total.item(), torch.get_num_threads()


def fail_on(rank: int, kind: str) -> None:
    print(f"rank {dist.get_rank()} was here", flush=True)
    if dist.get_rank() == rank:
        if kind == "data":
            raise DataError("shard 7 is torn")
        if kind == "unpicklable":
            raise Unpicklable(1, 2)
        if kind == "exit":
            sys.exit(3)
        os.kill(os.getpid(), 9)
    dist.barrier()


def hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(60)


def look_around() -> tuple[str, str | None, float]:
    return str(Path.cwd()), os.environ.get("CLAP_ZERO_TEST"), torch.rand(()).item()


def child_of_rank() -> int:
    return subprocess.Popen(["sleep", "600"]).pid


@pytest.mark.parametrize("world_size", [2, 4])
def test_results_come_in_order_and_ranks_work_together(world_size: int) -> None:
    contents = [Content(10**rank) for rank in range(world_size)]
    results = run_distributed(contribute, world_size, contents)
    assert [r[0] for r in results] == contents
    assert {r[1] for r in results} == {float(sum(c.value for c in contents))}
    assert {r[2] for r in results} == {1}


def test_pools_are_reused_and_sizes_coexist() -> None:
    two, four = run_distributed(rank_and_pid, 2), run_distributed(rank_and_pid, 4)
    assert [rank for rank, _ in four] == [0, 1, 2, 3]
    assert run_distributed(rank_and_pid, 2) == two
    assert run_distributed(rank_and_pid, 4) == four


def test_fresh_ranks_are_new_and_end() -> None:
    pool = run_distributed(rank_and_pid, 2)
    fresh = run_distributed(rank_and_pid, 2, fresh=True)
    assert {pid for _, pid in pool}.isdisjoint({pid for _, pid in fresh})
    assert not any(psutil.pid_exists(pid) for _, pid in fresh)
    assert run_distributed(rank_and_pid, 2) == pool


def test_a_call_happens_where_it_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CLAP_ZERO_TEST", "set")
    first = run_distributed(look_around, 2)
    assert first[0][:2] == (str(tmp_path), "set")
    monkeypatch.delenv("CLAP_ZERO_TEST")
    assert run_distributed(look_around, 2)[1][1:] == (None, first[1][2]), "the variable goes, the seed stays"


def test_an_exception_keeps_its_type_and_brings_rank_traceback_and_output() -> None:
    with pytest.raises(DataError, match="shard 7 is torn") as caught:
        run_distributed(fail_on, 2, 1, "data")
    cause = str(caught.value.__cause__)
    assert "rank 1 of 2 failed (rank 0 was still running)" in cause
    assert "in fail_on" in cause
    assert "rank 1 was here" in cause


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("unpicklable", "Unpicklable: two arguments"),
        ("exit", "SystemExit: 3"),
        ("kill", "rank 0 was killed by signal 9"),
    ],
)
def test_other_ends_of_a_rank_are_errors_and_the_next_call_works(kind: str, message: str) -> None:
    before = run_distributed(rank_and_pid, 2)
    with pytest.raises(RankError, match=message):
        run_distributed(fail_on, 2, 0, kind)
    assert not any(psutil.pid_exists(pid) for _, pid in before)
    assert [rank for rank, _ in run_distributed(rank_and_pid, 2)] == [0, 1]


def test_a_hang_is_an_error_that_shows_the_line() -> None:
    run_distributed(rank_and_pid, 2)
    start = time.monotonic()
    with pytest.raises(RankTimeout, match=r"ranks \[1\] of 2 did not finish within 1 s") as caught:
        run_distributed(hang_on, 2, 1, timeout_s=1)
    assert time.monotonic() - start < 10
    assert "in hang_on" in str(caught.value)


def test_children_of_a_rank_end_with_it() -> None:
    (child,) = run_distributed(child_of_rank, 1, fresh=True)
    deadline = time.monotonic() + 5
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_functions_that_ranks_cannot_find_are_refused() -> None:
    with pytest.raises(ValueError, match="top level"):
        run_distributed(lambda: None, 2)


def test_ranks_end_with_the_test_process(tmp_path: Path) -> None:
    """Killed so that no exit handler runs, while a call is under way."""
    (tmp_path / "program.py").write_text(
        textwrap.dedent("""
        import os, time
        from clap_zero.testing import run_distributed
        def report():
            print(os.getpid(), flush=True)
            open("pid", "w").write(str(os.getpid()))
            time.sleep(600)
        if __name__ == "__main__":
            run_distributed(report, 1)
        """)
    )
    with subprocess.Popen([sys.executable, "program.py"], cwd=tmp_path) as program:
        pid_file = tmp_path / "pid"
        deadline = time.monotonic() + 60
        while not (pid_file.exists() and pid_file.read_text()):
            assert time.monotonic() < deadline
            assert program.poll() is None
            time.sleep(0.1)
        program.kill()
    rank = psutil.Process(int(pid_file.read_text()))
    rank.wait(timeout=10)
