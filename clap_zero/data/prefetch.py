"""Fetching in the background what a reader will soon ask for."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any

_THREADS = 8
MAX_PENDING = 64
"""Hints that are kept."""


class Prefetcher:
    """Runs hinted work on a few daemon threads and keeps the results until they are asked for.

    At most `max_pending` are kept: more hints are refused, because what was hinted first is needed first. So whoever
    hints has to take each result, or drop it. Threads start with the first hint, in the process that gives it.

    Args:
        max_pending: results and work that are kept.
    """

    def __init__(self, max_pending: int = MAX_PENDING) -> None:
        self._max_pending = max_pending
        self._ready = threading.Condition()
        self._futures: dict[Hashable, Future[Any]] = {}
        self._queue: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._num_threads, self._num_idle = 0, 0
        self._closed = False

    def hint(self, name: Hashable, work: Callable[[], Any]) -> None:
        """Has `work` done soon, once for each name, unless too much is pending already."""
        with self._ready:
            if name in self._futures or self._closed or len(self._futures) >= self._max_pending:
                return
            future: Future[Any] = Future()
            self._futures[name] = future
            self._queue.append((future, work))
            if self._num_idle < len(self._queue) and self._num_threads < _THREADS:
                self._num_threads += 1
                threading.Thread(target=self._work, name="clap-zero-prefetch", daemon=True).start()
            self._ready.notify()

    def take(self, name: Hashable) -> Future[Any] | None:
        """The hinted work of this name, done or not; None where there is none, or where it has not begun yet."""
        with self._ready:
            future = self._futures.pop(name, None)
        # Work that waits behind others is better done by the one that needs it now.
        return None if future is None or future.cancel() else future

    def drop(self, name: Hashable) -> None:
        """Forgets a hint that is of no use any more."""
        self.take(name)

    def close(self) -> None:
        """Ends the threads when they are done with what they do now."""
        with self._ready:
            self._closed = True
            self._queue.clear()
            self._futures.clear()
            self._ready.notify_all()

    def _work(self) -> None:
        while True:
            with self._ready:
                self._num_idle += 1
                while not self._queue and not self._closed:
                    self._ready.wait()
                self._num_idle -= 1
                if self._closed:
                    return
                future, work = self._queue.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:  # noqa: BLE001  (handed to whoever asks, whatever it is)
                    future.set_exception(error)
            del future, work  # or the thread would keep the bytes while it waits
