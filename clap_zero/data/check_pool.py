"""The processes of `clap-zero check`. One that dies over a file costs that sample; the rest of its shard is read on.

A process pool of the standard library ends when one of its processes is killed and does not know what that one did.
Here each process has a pipe of its own, and a number in shared memory that says what it reads.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess

from clap_zero.data.batch import LoaderPlan
from clap_zero.data.blacklist import Blacklist
from clap_zero.data.check_worker import OPENING, Done, Message, Place, Reached, Ready, Task, run_worker
from clap_zero.data.processes import forkserver_context, starting_workers
from clap_zero.errors import LaunchError

SAMPLE_LIMIT_S = 300.0
"""A process that is silent for longer, on top of what a stalled source may take, is stuck in a sample."""
_END_S = 5.0
_MAX_FAILED_STARTS = 3


@dataclass
class _Worker:
    """A process, its end of the pipe and what it is doing."""

    process: ForkServerProcess
    connection: Connection
    place: Place
    task: Task | None = None
    reached: int = 0
    ready: bool = False
    heard_s: float = 0.0
    stuck: bool = False


def read_all(
    tasks: Iterable[Task],
    *,
    plan: LoaderPlan,
    blacklist: Blacklist,
    workers: int,
    limit_s: float | None = None,
    target: Callable[..., None] = run_worker,
) -> Generator[tuple[Task, Message]]:
    """Reads shards in processes and yields what they say, in no order over shards; all of them have ended afterwards.

    Args:
        tasks: the shards; taken as processes get free.
        plan: how samples are read.
        blacklist: samples to leave out.
        workers: number of processes.
        limit_s: silence in seconds after which a process is ended and its sample named; None: by what the plan lets a
            remote source take.
        target: what each process runs, with the arguments of `run_worker`.

    Raises:
        LaunchError: the processes die before they read anything.
    """
    if limit_s is None:
        # Back-off between the tries may take as long as the tries.
        limit_s = SAMPLE_LIMIT_S + 2 * plan.policy.timeout_s * (plan.policy.retries + 1)
    pool = _Pool(
        iter(tasks), target=partial(target, parent_pid=os.getpid(), plan=plan, blacklist=blacklist), limit_s=limit_s
    )
    try:
        yield from pool.run(workers)
    finally:
        pool.end()


class _Pool:
    def __init__(self, tasks: Iterator[Task], *, target: Callable[[Connection, Place], None], limit_s: float) -> None:
        self._tasks, self._again = tasks, deque[Task]()
        self._target, self._limit_s = target, limit_s
        self._workers: list[_Worker] = []
        self._failed_starts = 0

    def run(self, workers: int) -> Iterator[tuple[Task, Message]]:
        # No more processes than shards: the first tasks are taken here.
        while len(self._workers) < workers and (task := self._next()) is not None:
            self._workers.append(self._start(task))
        while self._workers:
            ready = wait([worker.connection for worker in self._workers], timeout=min(1.0, self._limit_s))
            for worker in [worker for worker in self._workers if worker.connection in ready]:
                yield from self._listen(worker)
            self._end_stuck()

    def end(self) -> None:
        """Ends all processes now."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.connection.close()
        self._workers = []

    def _next(self) -> Task | None:
        return self._again.popleft() if self._again else next(self._tasks, None)

    def _start(self, task: Task) -> _Worker:
        context = forkserver_context("clap_zero.data.check_worker")
        ours, theirs = context.Pipe()
        place = context.RawValue("q", OPENING)
        process = context.Process(target=self._target, args=(theirs, place), name="check", daemon=True)
        try:
            with starting_workers():
                process.start()
        except KeyboardInterrupt:  # as a rule held back until it had started
            if process.pid is not None:
                process.kill()
            raise
        theirs.close()  # so that the end of the process is the end of the pipe
        with contextlib.suppress(ConnectionError):  # one that died already is found at the next look at its pipe
            ours.send(task)
        return _Worker(process, ours, place, task, reached=task.first, heard_s=time.monotonic())

    def _listen(self, worker: _Worker) -> Iterator[tuple[Task, Message]]:
        assert worker.task is not None
        try:
            messages: list[Message] = worker.connection.recv()
        except (EOFError, OSError):  # the latter where it died in the middle of a message
            yield from self._bury(worker)
            return
        worker.heard_s = time.monotonic()
        for message in messages:
            if isinstance(message, Ready):
                worker.ready, self._failed_starts = True, 0
            elif isinstance(message, Reached):
                worker.reached = message.sample_id
            else:
                yield worker.task, message
        if messages and isinstance(messages[-1], Done):
            self._go_on(worker)

    def _go_on(self, worker: _Worker) -> None:
        """Gives a process its next task, or lets it go."""
        worker.task = self._next()
        worker.reached = 0 if worker.task is None else worker.task.first
        worker.place.value = OPENING
        # A process that died meanwhile is found at the next look at its pipe.
        with contextlib.suppress(ConnectionError):
            worker.connection.send(worker.task)
        if worker.task is None:
            _end(worker)
            self._remove(worker)

    def _bury(self, worker: _Worker) -> Iterator[tuple[Task, Message]]:
        """Has another process go on where a dead one was last heard of, without the sample that it died over."""
        _end(worker)
        self._remove(worker)
        task, place, how = worker.task, worker.place.value, _how(worker)
        assert task is not None
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts >= _MAX_FAILED_STARTS:
                raise LaunchError(f"the processes that read shards do not start, the last {how}: is memory full?")
            self._again.append(task)
        elif place == OPENING:
            yield task, Done(f"the process that read its headers {how}", task.shard.num_samples - task.first)
        else:
            lost = {**task.lost, place: f"the process that read it {how}"}
            self._again.append(replace(task, first=worker.reached, lost=lost))
        following = self._next()
        if following is not None:
            self._workers.append(self._start(following))

    def _remove(self, worker: _Worker) -> None:
        worker.connection.close()
        self._workers.remove(worker)

    def _end_stuck(self) -> None:
        silent_since = time.monotonic() - self._limit_s
        for worker in self._workers:
            if worker.ready and worker.heard_s < silent_since and not worker.stuck:
                worker.stuck = True
                worker.process.kill()  # the end of its pipe tells the rest


def _end(worker: _Worker) -> None:
    """Waits for a process that has nothing more to do; one that does not end, such as one that is stopped, is ended."""
    worker.process.join(_END_S)
    if worker.process.is_alive():
        worker.process.kill()
        worker.process.join()


def _how(worker: _Worker) -> str:
    if worker.stuck:
        return "got stuck and was ended"
    code = worker.process.exitcode or 0
    return f"died: {signal.Signals(-code).name}" if code < 0 else f"died with exit code {code}"
