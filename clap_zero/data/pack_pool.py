"""Encodes items in many processes with the order kept.

The parent reads no audio and writes what comes back. A stretch of long clips keeps no process waiting: many items are
handed out ahead, as long as what lies in memory for it stays bounded.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing import forkserver

from clap_zero.data.pack_encoding import Encoded, Encoding, unexpected
from clap_zero.data.pack_items import Item
from clap_zero.data.pack_shared import Slot, Slots
from clap_zero.data.pack_workers import WORKER_MODULE, Workers
from clap_zero.data.processes import forkserver_context, starting_workers
from clap_zero.errors import DataError

_AHEAD = 32
"""Items for each worker."""
_AHEAD_BYTES = 1 << 29
_MAX_DEATHS = 20
_MAX_UNEXPECTED, _MAX_UNEXPECTED_FRACTION = 20, 0.001
"""More errors that nobody foresaw than both of these mean that something other than the clips is wrong."""


def encode_all(items: Iterable[Item], encoding: Encoding, *, workers: int) -> Iterator[Encoded]:
    """Encodes items in their order; the result does not depend on `workers`.

    An item whose worker dies is tried once more with a process for itself, and rejected if that dies, too.

    Args:
        items: read lazily.
        encoding: how they are stored.
        workers: processes; 0 or 1 works in this one.

    Raises:
        DataError: workers die again and again, or clip after clip fails for reasons that nobody foresaw.
    """
    num_unexpected = 0
    for number, result in enumerate(_encode_all(items, encoding, workers), start=1):
        num_unexpected += result.unexpected
        if result.unexpected and num_unexpected > max(_MAX_UNEXPECTED, _MAX_UNEXPECTED_FRACTION * number):
            raise DataError(
                f"{num_unexpected} of {number} clips failed in ways that are hardly theirs, the latest "
                f"{result.item.name}: {result.reason}"
            )
        yield result


def _encode_all(items: Iterable[Item], encoding: Encoding, workers: int) -> Iterator[Encoded]:
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
    forkserver_context(WORKER_MODULE)
    with starting_workers():
        forkserver.ensure_running()


@dataclass
class _Task:
    """An item, and what lies in memory for it: its file, then what is stored of it.

    Attributes:
        future: None while it is not handed out.
        suspect: it was under way when a worker died.
        in_company: it was tried beside other suspects, and its worker died again: of it, or of what all take of memory.
    """

    item: Item
    future: Future[Encoded] | None = None
    slot: Slot | None = None
    size_bytes: int = 0
    taken: bool = False
    suspect: bool = False
    in_company: bool = False


class _Pool:
    """Workers, and the items that they work on. There are no workers while it is found out which item kills them."""

    def __init__(self, encoding: Encoding, number: int) -> None:
        self._encoding = encoding
        self._number = number
        self._workers: Workers | None = Workers(number)
        self._deaths = 0
        self._held_bytes = 0
        self._counting = threading.Lock()
        self._slots = Slots(_AHEAD * number)
        self.pending: deque[_Task] = deque()

    def submit(self, item: Item) -> None:
        """Hands out an item, at once or when there are workers again."""
        task = _Task(item, slot=self._slots.take())
        self.pending.append(task)
        self._count(task, len(item.audio or b""))
        if self._workers is not None:
            self._send(self._workers, task)

    def _send(self, workers: Workers, task: _Task) -> Future[Encoded]:
        task.future = workers.submit(_work, task.item, self._encoding, task.slot)
        task.future.add_done_callback(functools.partial(self._finished, task))
        return task.future

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
        return len(self.pending) >= _AHEAD * self._number or (bool(self.pending) and self._held_bytes > _AHEAD_BYTES)

    def take(self) -> Iterator[Encoded]:
        """Yields the result of the first item that is handed out and not taken."""
        result = self._first()
        task = self.pending.popleft()
        self._count(task, 0)
        task.taken = True
        if result.shared_bytes and task.slot is not None:
            result = replace(result, data=self._slots.view(task.slot, result.shared_bytes), shared_bytes=0)
        yield result
        self._slots.give_back(task.slot)

    def _first(self) -> Encoded:
        """Waits for the result of the first item, and does what has to be done for it when workers die."""
        while True:
            task = self.pending[0]
            if task.suspect:
                self._try_suspects()
            elif task.future is None:
                self._start_again()
            else:
                if self._workers is not None:
                    self._workers.wait_for(task.future)
                error = task.future.exception()
                if error is None:
                    return task.future.result()
                if not isinstance(error, BrokenProcessPool):  # the item could not travel
                    return unexpected(task.item, error)
                self._suspect()

    def _suspect(self) -> None:
        """Takes back what is not done; one of the items that were under way has killed its worker."""
        self._stop()
        lost = [task for task in self.pending if task.future is None or not _is_done(task.future)]
        for task in lost:
            task.future = None
        # A worker has one item, and the executor keeps another one ready.
        for task in lost[: 2 * self._number + 1]:
            task.suspect = True

    def _try_suspects(self) -> None:
        """Encodes the first suspects, each in a process of its own; the first one alone where memory may be short."""
        suspects = [task for task in self.pending if task.suspect]
        alone = suspects[0].in_company or self._held_bytes > _AHEAD_BYTES
        batch = suspects[:1] if alone else [task for task in suspects if not task.in_company][: self._number]
        workers = [Workers(1) for _ in batch]
        try:
            futures = [self._send(own, task) for own, task in zip(workers, batch, strict=True)]
            for own, future in zip(workers, futures, strict=True):
                own.wait_for(future)
        finally:
            for own in workers:
                own.stop()
        for task, future in zip(batch, futures, strict=True):
            if not isinstance(future.exception(), BrokenProcessPool):
                task.suspect = False
            elif len(batch) > 1:
                task.future, task.in_company = None, True
            else:
                task.future, task.suspect = self._rejected(task), False

    def _rejected(self, task: _Task) -> Future[Encoded]:
        self._deaths += 1
        if self._deaths > _MAX_DEATHS:
            raise DataError(
                f"{self._deaths} packing processes died, the latest with {task.item.name} (killed, or out of memory): "
                "use fewer --workers, or a lower --max-seconds"
            )
        rejected: Future[Encoded] = Future()
        rejected.set_result(Encoded(task.item.without_bytes(), reason="the process that decoded it died"))
        return rejected

    def _start_again(self) -> None:
        self._stop()
        self._workers = Workers(self._number)
        for task in self.pending:
            if task.future is None and not task.suspect:
                self._send(self._workers, task)

    def close(self) -> None:
        """Ends the workers, and lets go of the memory."""
        self._stop()
        self._slots.close()

    def _stop(self) -> None:
        if self._workers is not None:
            self._workers.stop()
            self._workers = None


def _work(item: Item, encoding: Encoding, slot: Slot | None) -> Encoded:
    """What runs in a worker. The parent imports only this module, which takes a tenth of the time."""
    from clap_zero.data.pack_audio import encode

    result = encode(item, encoding)
    if isinstance(result.data, bytes) and slot is not None and slot.put(result.data):
        return replace(result, data=None, shared_bytes=len(result.data))
    return result


def _is_done(future: Future[Encoded]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None
