"""Encodes items in many processes with the order kept.

The parent reads no audio and writes what comes back. A stretch of long clips keeps no process waiting: many items are
handed out ahead, as long as what lies in memory for it stays bounded.
"""

from __future__ import annotations

import functools
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from multiprocessing import forkserver

from clap_zero.data.pack_encoding import Encoded, Encoding
from clap_zero.data.pack_items import Item
from clap_zero.data.pack_shared import Slot, Slots
from clap_zero.data.processes import forkserver_context, init_worker, starting_workers
from clap_zero.errors import DataError

_WORKER_MODULE = "clap_zero.data.pack_audio"
_AHEAD = 32
"""Items for each worker."""
_AHEAD_BYTES = 1 << 29
_MAX_DEATHS = 20


def encode_all(items: Iterable[Item], encoding: Encoding, *, workers: int) -> Iterator[Encoded]:
    """Encodes items in their order; the result does not depend on `workers`.

    An item whose worker dies is tried once more with a process for itself, and rejected if that dies, too.

    Args:
        items: read lazily.
        encoding: how they are stored.
        workers: processes; 0 or 1 works in this one.

    Raises:
        DataError: workers die again and again.
    """
    if workers <= 1:
        from clap_zero.data.pack_audio import encode  # heavy, and of no use to a parent of workers

        yield from (encode(item, encoding) for item in items)
        return
    pool = _Pool(encoding, workers)
    try:
        for item in items:
            pool.submit(item)
            while pool.is_full():
                yield from pool.take()
        while pool.pending:
            yield from pool.take()
    finally:
        pool.close()


def warm_up() -> None:
    """Has the workers' imports begin while the parent still lists the source."""
    forkserver_context(_WORKER_MODULE)
    with starting_workers():
        forkserver.ensure_running()


@dataclass
class _Task:
    """An item that is handed out, and what lies in memory for it: its file, then what is stored of it."""

    item: Item
    future: Future[Encoded] = field(default_factory=Future)
    slot: Slot | None = None
    size_bytes: int = 0
    taken: bool = False


class _Pool:
    """Workers, and the items that they work on."""

    def __init__(self, encoding: Encoding, workers: int) -> None:
        self._encoding = encoding
        self._workers = workers
        self._executor = self._start(workers)
        self._deaths = 0
        self._held_bytes = 0
        self._counting = threading.Lock()
        self._slots = Slots(_AHEAD * workers)
        self.pending: deque[_Task] = deque()

    @staticmethod
    def _start(workers: int) -> ProcessPoolExecutor:
        context = forkserver_context(_WORKER_MODULE)
        return ProcessPoolExecutor(workers, mp_context=context, initializer=init_worker, initargs=(os.getpid(),))

    def submit(self, item: Item) -> None:
        """Hands out an item."""
        task = _Task(item, slot=self._slots.take())
        self.pending.append(task)
        self._count(task, len(item.audio or b""))
        task.future = self._send(self._executor, task)
        task.future.add_done_callback(functools.partial(self._finished, task))

    def _send(self, executor: ProcessPoolExecutor, task: _Task) -> Future[Encoded]:
        with starting_workers():
            try:
                return executor.submit(_work, task.item, self._encoding, task.slot)
            except BrokenProcessPool as error:  # noticed between two items: as if this one had been under way
                future: Future[Encoded] = Future()
                future.set_exception(error)
                return future

    def _finished(self, task: _Task, future: Future[Encoded]) -> None:
        if _is_done(future):
            result = future.result()
            self._count(task, len(task.item.audio or b"") + len(result.data or b"") + result.shared_bytes)

    def _count(self, task: _Task, size_bytes: int) -> None:
        with self._counting:
            if not task.taken:  # a result can be taken before its callback has run
                self._held_bytes += size_bytes - task.size_bytes
                task.size_bytes = size_bytes

    def is_full(self) -> bool:
        """Whether results have to be taken before more is handed out."""
        return len(self.pending) >= _AHEAD * self._workers or (bool(self.pending) and self._held_bytes > _AHEAD_BYTES)

    def take(self) -> Iterator[Encoded]:
        """Yields the result of the first item that is handed out and not taken."""
        try:
            result = self.pending[0].future.result()
        except BrokenProcessPool:
            self._find_the_deadly()
            result = self.pending[0].future.result()
        task = self.pending.popleft()
        self._count(task, 0)
        task.taken = True
        if result.shared_bytes and task.slot is not None:
            result = replace(result, data=self._slots.view(task.slot, result.shared_bytes), shared_bytes=0)
        yield result
        self._slots.give_back(task.slot)

    def _find_the_deadly(self) -> None:
        """Encodes the items that were under way when a worker died one by one, and the rest with new workers."""
        self._stop()
        lost = [task for task in self.pending if not _is_done(task.future)]
        # A worker has one item, and the executor keeps another one ready.
        for task in lost[: 2 * self._workers + 1]:
            task.future = self._alone(task)
        self._executor = self._start(self._workers)
        for task in lost[2 * self._workers + 1 :]:
            task.future = self._send(self._executor, task)

    def _alone(self, task: _Task) -> Future[Encoded]:
        executor = self._start(1)
        try:
            future = self._send(executor, task)
            future.exception()  # waits
        finally:
            executor.shutdown(wait=True)
        if not isinstance(future.exception(), BrokenProcessPool):
            return future
        self._deaths += 1
        if self._deaths > _MAX_DEATHS:
            raise DataError(
                f"{self._deaths} packing processes died, the latest with {task.item.name} (killed, or out of memory): "
                "use fewer --workers, or a lower --max-seconds"
            )
        rejected: Future[Encoded] = Future()
        rejected.set_result(Encoded(task.item.without_bytes(), reason="the process that decoded it died"))
        return rejected

    def close(self) -> None:
        """Ends the workers, and lets go of the memory."""
        self._stop()
        self._slots.close()

    def _stop(self) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)


def _work(item: Item, encoding: Encoding, slot: Slot | None) -> Encoded:
    """What runs in a worker. The parent imports only this module, which takes a tenth of the time."""
    from clap_zero.data.pack_audio import encode

    result = encode(item, encoding)
    if isinstance(result.data, bytes) and slot is not None and slot.put(result.data):
        return replace(result, data=None, shared_bytes=len(result.data))
    return result


def _is_done(future: Future[Encoded]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None
