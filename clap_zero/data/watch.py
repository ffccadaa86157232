"""Watching over reads of remote sources: what gives nearly nothing for a while has stalled, and is left behind.

A slow trickle is a stall, too: less than MIN_BYTES_PER_S over the whole of the timeout. What gives a little more than
that has an end by the clock. Work that cannot be cancelled
runs in a daemon thread of its own, which neither holds up the reader nor the end of the program.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")

MIN_BYTES_PER_S = 16_384
_POLL_S = 0.1


class StalledError(Exception):
    """A source gave too little for too long."""


@dataclass(frozen=True)
class Allowance:
    """How long a source may take.

    Attributes:
        timeout_s: it has stalled when it gives too little for so long.
        until: time.monotonic() at which it has to be done, however steadily it gives: other ranks wait.
    """

    timeout_s: float
    until: float = math.inf


class Progress:
    """How many bytes have come; counted by the thread that reads, looked at by the one that waits."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Counts bytes that have arrived."""
        self.num_bytes += num_bytes


class StallWatch:
    """Tells when too little has come.

    Args:
        progress: what has come so far.
        allowed: `timeout_s` is the length of the window that is looked at.
    """

    def __init__(self, progress: Progress, allowed: Allowance) -> None:
        self._progress, self._timeout_s, self._until = progress, allowed.timeout_s, allowed.until
        self._began = time.monotonic()
        self._since, self._seen = time.monotonic(), progress.num_bytes

    def look(self) -> None:
        """To be called every now and then.

        Raises:
            StalledError: the source has stalled, or its time is up.
        """
        now = time.monotonic()
        if now > self._until:
            raise StalledError(f"was not done in time: {self._progress.num_bytes} bytes in {now - self._began:.3g} s")
        if now - self._since < self._timeout_s:
            return
        came = self._progress.num_bytes - self._seen
        if came < MIN_BYTES_PER_S * (now - self._since):
            raise StalledError(f"stalled: {came} bytes in {now - self._since:.3g} s")
        self._since, self._seen = now, self._progress.num_bytes


def in_thread(work: Callable[[], T]) -> Future[T]:
    """Runs `work` in a daemon thread of its own. Executors wait for their threads when the program ends."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001  (handed to whoever waits, whatever it is)
            future.set_exception(error)

    threading.Thread(target=run, name="clap-zero-read", daemon=True).start()
    return future


def wait_for(future: Future[Any], progress: Progress, allowed: Allowance) -> Any:
    """The result of `future`, unless it stalls. A stalled one is cancelled, or left behind where it cannot be.

    Raises:
        StalledError: too little came, or not all in time.
    """
    watch = StallWatch(progress, allowed)
    try:
        while True:
            try:
                return future.result(timeout=min(_POLL_S, allowed.timeout_s / 4))
            except TimeoutError:
                if future.done():  # done just now, or it is the work's own error
                    return future.result()
                watch.look()
    finally:
        future.cancel()
