"""How a loader's worker ends before its time, and what is said of it: real workers, real signals."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from clap_zero.data import loader, worker_ends
from clap_zero.data.index import load_index
from clap_zero.data.loader import LOOK_S, train_batches
from clap_zero.data.worker_ends import WatchedWorkers
from clap_zero.errors import DataError
from tests.processes import command_of
from tests.unit.data.shard_files import write_split
from tests.unit.data.taking import plan


@pytest.fixture
def batches(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    index = load_index([str(write_split(tmp_path / "train", [6, 6]))])
    stream = train_batches(index, plan=plan(workers=1, micro_batch=2, prefetch=1, stall_timeout_s=request.param))
    yield stream
    stream.close()  # type: ignore[attr-defined]


def worker_of_this_process() -> psutil.Process:
    """The only worker: the fork server's child. Other tests' servers have no children any more."""
    children = [
        child
        for server in psutil.Process().children()
        for child in server.children()
        if "forkserver" in command_of(server)
    ]
    assert len(children) == 1, children
    return children[0]


@pytest.mark.parametrize("batches", [60.0], indirect=True)
@pytest.mark.parametrize(
    ("number", "said"),
    [
        (signal.SIGKILL, "killed by SIGKILL, which is what the kernel sends when memory runs out: lower data.workers"),
        (signal.SIGBUS, "killed by SIGBUS: is /dev/shm full?"),
    ],
)
def test_l11_a_killed_worker_is_named_with_its_signal_and_the_way_out(batches: Any, number: int, said: str) -> None:
    next(batches)
    worker = worker_of_this_process()
    worker.send_signal(number)
    began = time.monotonic()
    with pytest.raises(DataError) as caught:
        for _ in range(10):
            next(batches)
    assert str(caught.value).startswith(f"the data loader of rank 0 failed: worker 0 (process {worker.pid}): {said}")
    assert time.monotonic() - began < LOOK_S + 4


@pytest.mark.parametrize("batches", [8.0], indirect=True)  # a worker imports for seconds before its first batch
def test_l11_a_stalled_worker_is_named_with_what_it_does(batches: Any) -> None:
    next(batches)
    worker = worker_of_this_process()
    worker.suspend()
    began = time.monotonic()
    with pytest.raises(DataError) as caught:
        for _ in range(10):
            next(batches)
    assert str(caught.value).startswith(
        "the data loader of rank 0 failed: no batch came from the loader's workers for "
    )
    assert time.monotonic() - began < 8 + 2 * LOOK_S + 4
    assert f"worker 0 (process {worker.pid}): it was stopped by a signal (SIGSTOP)" in str(caught.value)


@pytest.mark.parametrize("batches", [60.0], indirect=True)
def test_a_worker_that_is_only_late_loses_nothing(batches: Any, tmp_path: Path) -> None:
    """torch is asked again and again meanwhile, and still gives each batch once."""
    expected = train_batches(load_index([str(tmp_path / "train")]), plan=plan(micro_batch=2))
    seen = [next(batches).keys]
    worker = worker_of_this_process()
    worker.suspend()
    until = time.monotonic() + 2.5 * LOOK_S
    waker = os.posix_spawn("/bin/sh", ["sh", "-c", f"sleep {2.5 * LOOK_S}; kill -CONT {worker.pid}"], os.environ)
    seen += [next(batches).keys for _ in range(5)]
    assert time.monotonic() >= until - 0.2
    os.waitpid(waker, 0)  # else it stays among the children that later tests look at
    assert seen == [next(expected).keys for _ in range(6)]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (-signal.SIGSEGV, "killed by SIGSEGV, in a decoder"),
        (-signal.SIGTERM, "killed by SIGTERM"),
        (1, "ended with exit code 1: is memory or /dev/shm full?"),
    ],
)
def test_each_end_has_its_words(code: int, said: str) -> None:
    assert WatchedWorkers()._how(code).startswith(said)


def test_what_the_kernel_killed_meanwhile_is_said_to_be_that(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = WatchedWorkers()
    killed = worker_ends.oom.kernel_kills() + 1
    monkeypatch.setattr(worker_ends.oom, "kernel_kills", lambda: killed)
    assert watched._how(-signal.SIGKILL).startswith("killed by the kernel because memory ran out (SIGKILL)")


def test_time_in_which_the_job_was_suspended_is_no_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock jumps by an hour between two looks; the batch is there at the third."""
    clock = iter([0.0, 1.0, 3600.0])
    monkeypatch.setattr(loader.time, "monotonic", lambda: next(clock))

    class Slow:
        looks = 0

        def __next__(self) -> str:
            self.looks += 1
            if self.looks < 3:
                raise RuntimeError("DataLoader timed out after 1 seconds")
            return "batch"

    assert loader._next(Slow(), WatchedWorkers(), stall_timeout_s=540) == "batch"
