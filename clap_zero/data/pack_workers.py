"""The processes that encode for a pack. They end at once, whatever they are doing and whatever became of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection
from typing import Any, ParamSpec, TypeVar

from clap_zero.data.processes import forkserver_context, init_worker, starting_workers

WORKER_MODULE = "clap_zero.data.pack_audio"
"""What the workers import; the fork server has it ready."""
_LOOK_S = 2.0

P = ParamSpec("P")
T = TypeVar("T")


class Workers:
    """A pool of processes, given up as a whole once one of them has died.

    The standard library ends the others with SIGTERM, which our workers block, and waits for them without a limit. And
    where a worker dies in the middle of an answer the library goes on reading that answer for ever. So the processes
    are killed here, and the pipe of the answers is closed behind them.

    Args:
        number: of processes.
    """

    def __init__(self, number: int) -> None:
        self._executor = ProcessPoolExecutor(
            number, mp_context=forkserver_context(WORKER_MODULE), initializer=init_worker, initargs=(os.getpid(),)
        )

    def submit(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Hands out a call. Its future has BrokenProcessPool where a process died before it was done."""
        with starting_workers():
            try:
                return self._executor.submit(function, *args, **kwargs)
            except BrokenProcessPool as error:  # noticed between two calls: as if this one had been under way
                future: Future[T] = Future()
                future.set_exception(error)
                return future

    def wait_for(self, future: Future[T]) -> None:
        """Waits until a call is done, or given up because a process died."""
        has_lost_one = False
        while not future.done() and not wait([future], _LOOK_S).done:
            if has_lost_one:  # and the executor has not noticed since the last look
                self._kill()
            sentinels = [process.sentinel for process in self._processes()]
            has_lost_one = bool(connection.wait(sentinels, timeout=0)) if sentinels else False

    def stop(self) -> None:
        """Ends all processes; afterwards none of them writes anywhere."""
        self._kill()
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _processes(self) -> list[Any]:
        return list((self._executor._processes or {}).values())

    def _kill(self) -> None:
        for process in self._processes():
            process.kill()
        answers: Any = self._executor._result_queue
        if answers is not None:
            answers._writer.close()  # what reads the answers then sees their end
