"""Pools of rank processes that stay alive between tests, so that a test of two ranks costs milliseconds, not imports.

A call that fails or runs out of time takes its pool with it: the ranks may be anywhere inside a collective. The next
call of that size starts a new one.
"""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from clap_zero.testing.messages import STACK_SIGNAL, Failure, Reply, pack_task

START_TIMEOUT_S = 300.0
GRACE_S = 3.0
"""How long the other ranks may still report after the first failure, in seconds."""
MAX_LOG_BYTES = 8000
"""How much of a rank's output an error quotes, in bytes."""


class RankError(RuntimeError):
    """A rank died, or raised something that cannot be raised again here. As a cause: the traceback of a rank."""


class RankTimeout(RankError, TimeoutError):
    """Ranks did not finish in time. The message holds the stack of each."""


def run_distributed(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120, fresh: bool = False
) -> list[Any]:
    """Run fn(*args) on `world_size` real processes that have joined one gloo group.

    Each rank has one torch thread, the seed 0, this process's working directory and environment, and RANK, WORLD_SIZE,
    LOCAL_RANK and MASTER_* of its own. No GPU is visible there.

    Args:
        fn: A function at the top level of a module; it finds out its rank by itself.
        world_size: Number of ranks.
        *args: Given to every rank alike; they and the results have to be picklable.
        timeout_s: Seconds that the call may take, without the start of the ranks.
        fresh: Use processes that nothing has run in, and end them afterwards.

    Returns:
        What each rank returned, in order of rank.

    Raises:
        RankTimeout: A rank did not finish in time.
        RankError: A rank died, or exited.
        Exception: What a rank raised, with its traceback as the cause. When several did, the one that came first.
    """
    task = pack_task(fn, args)
    pool = _pools.pop(world_size, None)
    if fresh and pool is not None:
        _pools[world_size] = pool
    if fresh or pool is None or not pool.usable():
        if pool is not None and not fresh:
            pool.close()
        pool = _start(world_size)
    try:
        results = pool.run(task, timeout_s=timeout_s)
    except BaseException:
        pool.close()
        raise
    if fresh:
        pool.close()
    else:
        _pools[world_size] = pool
    return results


class _Rank:
    """One rank process, the pipe to it and the file that holds what it printed."""

    def __init__(self, rank: int, world_size: int, port: int) -> None:
        self.rank = rank
        # Without a name: nothing is left behind, however this process ends.
        self.log = tempfile.TemporaryFile()  # noqa: SIM115  closed in kill
        self.log_start = 0
        ours, theirs = socket.socketpair()
        root = str(Path(__file__).resolve().parents[2])
        environment = rank_environment(rank, world_size, port)
        environment["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [environment.get("PYTHONPATH")])])
        command = [sys.executable, "-m", "clap_zero.testing.rank", str(theirs.fileno()), str(os.getpid())]
        with theirs:
            self.process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=self.log,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self.pipe = Connection(ours.detach())

    def send(self, task: bytes) -> None:
        self.log_start = os.fstat(self.log.fileno()).st_size
        with suppress(BrokenPipeError):  # it died; the missing reply says so
            self.pipe.send_bytes(task)

    def receive(self) -> Reply:
        """The reply that is waiting in the pipe, or what there is to say about a rank that died."""
        try:
            return pickle.loads(self.pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=5)
            code = self.process.poll()
            how = f"was killed by signal {-code}" if code is not None and code < 0 else f"exited with code {code}"
            return Failure(None, f"rank {self.rank} {how} without an answer", died=True)

    def output(self) -> str:
        """The end of what the rank printed since the task was sent."""
        size = os.fstat(self.log.fileno()).st_size
        start = max(self.log_start, size - MAX_LOG_BYTES)
        return os.pread(self.log.fileno(), size - start, start).decode(errors="replace").strip()

    def kill(self) -> None:
        """End the process and its children; they share its session."""
        self.pipe.close()
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.log.close()


class _Pool:
    """Ranks that have joined one process group."""

    def __init__(self, world_size: int) -> None:
        self.owner = os.getpid()
        port = _free_port()
        self.ranks: list[_Rank] = []
        try:
            for rank in range(world_size):
                self.ranks.append(_Rank(rank, world_size, port))
            self._collect(START_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    def usable(self) -> bool:
        return self.owner == os.getpid() and all(rank.process.poll() is None for rank in self.ranks)

    def run(self, task: bytes, *, timeout_s: float) -> list[Any]:
        for rank in self.ranks:
            rank.send(task)
        return self._collect(timeout_s)

    def close(self) -> None:
        """Kill every rank. A fork of the process that started them leaves them alone."""
        if self.owner == os.getpid():
            for rank in self.ranks:
                rank.kill()
            self.ranks = []

    def _collect(self, timeout_s: float) -> list[Any]:
        """Wait for one reply of each rank.

        Returns:
            The results in order of rank.
        """
        values: dict[int, Any] = {}
        failures: dict[int, Failure] = {}
        deadline = time.monotonic() + timeout_s
        waiting = {rank.pipe: rank for rank in self.ranks}
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = waiting.pop(pipe)  # type: ignore[arg-type,call-overload]
                reply = rank.receive()
                if isinstance(reply, Failure):
                    failures[rank.rank] = reply
                    deadline = min(deadline, time.monotonic() + GRACE_S)
                else:
                    values[rank.rank] = reply.value
        if failures:
            self._raise_failure(failures, finished=set(values))
        if waiting:
            raise RankTimeout(self._stacks(sorted(rank.rank for rank in waiting.values()), timeout_s))
        return [values[rank.rank] for rank in self.ranks]

    def _raise_failure(self, failures: dict[int, Failure], *, finished: set[int]) -> None:
        """Raise what the first rank that failed raised; its cause tells of all ranks.

        `failures` is in order of time; a rank that died goes before those that raised, which mostly lost contact to it.
        """
        number, first = min(failures.items(), key=lambda item: not item[1].died)
        states = dict.fromkeys(finished, "had finished") | dict.fromkeys(failures, "failed too")
        others = ", ".join(
            f"rank {rank.rank} {states.get(rank.rank, 'was still running')}"
            for rank in self.ranks
            if rank.rank != number
        )
        details = f"rank {number} of {len(self.ranks)} failed ({others}):\n{first.text}"
        for other in failures.keys() - {number}:
            details += f"\n--- rank {other}:\n{failures[other].text}"
        for failed in failures:
            if output := self.ranks[failed].output():
                details += f"\n--- output of rank {failed}:\n{output}"
        if first.exception is None:
            raise RankError(details)
        raise first.exception from RankError(details)

    def _stacks(self, missing: list[int], timeout_s: float) -> str:
        """Ask the ranks that hang where they are."""
        for number in missing:
            with suppress(ProcessLookupError):
                os.kill(self.ranks[number].process.pid, STACK_SIGNAL)
        time.sleep(0.5)
        text = f"ranks {missing} of {len(self.ranks)} did not finish within {timeout_s:g} s"
        for number in missing:
            text += f"\n--- output and stacks of rank {number}:\n{self.ranks[number].output()}"
        return text


_pools: dict[int, _Pool] = {}


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """This process's environment with the place of one rank in it, and no GPU."""
    return os.environ | {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }


def _start(world_size: int) -> _Pool:
    """A new pool; once more if another program took the port between the look and the use."""
    try:
        return _Pool(world_size)
    except RankError as error:
        if "EADDRINUSE" not in str(error):
            raise
    return _Pool(world_size)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@atexit.register
def close_pools() -> None:
    """End all ranks. Runs at exit by itself."""
    while _pools:
        _pools.popitem()[1].close()
