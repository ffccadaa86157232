"""One rank's end of the hub: what both ends share. The watchdog's thread polls it; the main thread only posts."""

from __future__ import annotations

import contextlib
import os
import queue
import selectors
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clap_zero import phases
from clap_zero.distributed.hub_judge import Judge, Verdict
from clap_zero.distributed.hub_messages import Line, ProtocolError, encoded, number_of, text_of
from clap_zero.distributed.hub_stacks import innermost_frames, write_stacks

BEAT_S = 1.0
SMALL_JOB, SMALL_JOB_BEAT_S = 64, 0.4
"""With few ranks the last word of a dead one may be fresher."""
LARGE_JOB, LARGE_JOB_BEAT_S = 256, 2.0
"""With many, rank 0 has something else to do than to hear."""

ROUND_S = 0.2
"""Pause between two judgements, unless something has happened: each looks at all ranks."""

MOST_TOLD = 4000
"""Characters of an error that the other ranks hear; a line has an end, and one that is too long would be no word."""

MOST_WATCHED_S = 2.0
"""What one round counts for at the most: a thread that did not run for longer has not watched either."""

LEAVE_AFTER_S = 1.0
"""How long a rank may still find an error of its own after the verdict: its own message says more."""

POST_TIMEOUT_S = 1.0
_NEWS = frozenset({"failing", "goodbye", "stack", "unwatched"})
FLUSH_S = 1.0


@dataclass(frozen=True)
class Settings:
    """Who this rank is and how patient the hub is.

    Attributes:
        rank: Number of this rank.
        size: Number of ranks.
        host: Name of this machine.
        heartbeat_timeout_s: A rank that says nothing for so long is gone; None: never.
        hang_timeout_s: All ranks together may be without progress for so long; None: for ever.
        stacks: Directory that stacks are written into when the run hangs.
    """

    rank: int
    size: int
    host: str
    heartbeat_timeout_s: float | None
    hang_timeout_s: float | None
    stacks: Path


class Station(ABC):
    """Listens to the other side, sends beats, judges.

    Attributes:
        failing: `time.monotonic()` at which this rank said that it ends with an error, and its exit code.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.judge = Judge(
            own_rank=settings.rank,
            heartbeat_timeout_s=settings.heartbeat_timeout_s,
            hang_timeout_s=settings.hang_timeout_s,
        )
        self.judge.join(settings.rank, host=settings.host, pid=os.getpid())
        self.selector = selectors.DefaultSelector()
        self._posts: queue.SimpleQueue[tuple[dict[str, Any], threading.Event]] = queue.SimpleQueue()
        self._wake_read, self._wake_write = socket.socketpair()
        for end in (self._wake_read, self._wake_write):
            end.setblocking(False)
        self.selector.register(self._wake_read, selectors.EVENT_READ)
        self._beat_s = SMALL_JOB_BEAT_S if settings.size <= SMALL_JOB else BEAT_S
        if settings.size > LARGE_JOB:
            self._beat_s = LARGE_JOB_BEAT_S
        self._has_news = True
        self._last_round = self._last_beat = time.monotonic()
        self._left = False
        self.goodbye_heard = threading.Event()
        self.failing: tuple[float, int] | None = None

    # ---- for the main thread

    def fail(self, text: str, *, exit_code: int) -> None:
        """Says that this rank ends with an error; from now on it is left to end by itself for CLOSE_GRACE_S."""
        self.failing = self.failing or (time.monotonic(), exit_code)
        self.post({"failing": text[:MOST_TOLD]})

    def post(self, message: Mapping[str, Any]) -> None:
        """Says something to the other ranks; returns when it is on its way, after POST_TIMEOUT_S at the latest."""
        sent = threading.Event()
        self._posts.put((dict(message), sent))
        with contextlib.suppress(OSError):  # full: the thread has been woken often enough
            self._wake_write.send(b"\0")
        sent.wait(POST_TIMEOUT_S)
        if "goodbye" in message and self.settings.rank > 0:
            # What is on its way when a process ends may be lost, and would not be sent again.
            self.goodbye_heard.wait(POST_TIMEOUT_S)

    def goodbye(self) -> None:
        """Says that this rank has come to its end in good order."""
        self.post({"goodbye": True})

    # ---- for the watchdog's thread

    def poll(self, timeout_s: float) -> Verdict | None:
        """One round: hear what has come, say what is due.

        Args:
            timeout_s: Seconds to wait for something to come.

        Returns:
            Why the run ends; None while it goes on.
        """
        for key, _ in self.selector.select(timeout_s):
            if key.fileobj is self._wake_read:
                self._drain()
            else:
                self.hear(key.fileobj)
        self._say_posts()
        now = time.monotonic()
        if now - self._last_round < ROUND_S and not self._has_news:
            return None
        self._has_news = False
        self.understand(self.settings.rank, own_beat())
        self.judge.advance(min(now - self._last_round, MOST_WATCHED_S))
        self._last_round = now
        if now - self._last_beat >= self._beat_s:
            self._last_beat = now
            self.say(own_beat())
        for line in self.lines():
            line.flush()
        return None if self._left else self.decide()

    def abandon(self) -> None:
        """Says that this rank watches and beats no longer, and goes on all the same. Nothing is polled afterwards.

        The connections stay: an end would be taken for a death.
        """
        self.say({"unwatched": True})
        self.flush()

    def close(self) -> None:
        """Ends all connections."""
        for line in self.lines():
            line.close()
        self.selector.close()
        self._wake_read.close()
        self._wake_write.close()

    @abstractmethod
    def lines(self) -> list[Line]:
        """The connections that are open."""

    @abstractmethod
    def hear(self, source: Any) -> None:
        """Something has come in on a connection that the selector watches."""

    @abstractmethod
    def decide(self) -> Verdict | None:
        """What this rank makes of what it knows."""

    # ---- shared by both ends

    def say(self, message: Mapping[str, Any]) -> None:
        """Sends a message over all connections."""
        line_of_text = encoded(message)
        for line in self.lines():
            line.send_encoded(line_of_text)

    def flush(self) -> None:
        """Gives the network FLUSH_S to take what was said."""
        until = time.monotonic() + FLUSH_S
        while time.monotonic() < until:
            unsent = [line for line in self.lines() if not line.flush()]
            if not unsent:
                break
            time.sleep(0.01)

    def receive(self, line: Line) -> list[dict[str, Any]]:
        """What has come on a line; a line that talks nonsense is closed, a closed one is watched no longer."""
        try:
            messages = line.receive()
        except ProtocolError:
            messages = []
            line.close()
        if line.closed:
            self.forget(line)
        return messages

    def forget(self, line: Line) -> None:
        """Closes a line and watches it no longer; nothing happens when that was done before."""
        self._has_news = True
        with contextlib.suppress(KeyError, ValueError):  # it is not watched any more
            self.selector.unregister(line)
        line.close()

    def understand(self, rank: int, message: Mapping[str, Any]) -> None:
        """Gives the judge what a rank said."""
        if "phase" in message:
            phase, step = text_of(message, "phase"), number_of(message, "step")
            self.judge.beat(rank, phase=phase, step=step, progress=number_of(message, "progress", default=-1))
        self._has_news |= not _NEWS.isdisjoint(message)
        if "unwatched" in message:
            self.judge.unwatch(rank)
        if "failing" in message:
            self.judge.failing(rank, text_of(message, "failing"))
        if "goodbye" in message:
            self.judge.goodbye(rank)

    def own_stack(self) -> dict[str, Any]:
        """Writes the stacks of this rank and gives the message with its innermost frames."""
        write_stacks(self.settings.stacks / f"rank{self.settings.rank:05d}.txt")
        frames, waits = innermost_frames()
        return {"stack": frames, "waits": waits}

    def _drain(self) -> None:
        try:
            self._wake_read.recv(4096)
        except BlockingIOError:
            return

    def _say_posts(self) -> None:
        said = []
        while True:
            try:
                message, sent = self._posts.get_nowait()
            except queue.Empty:
                break
            self._left |= "goodbye" in message
            self.say(message)
            said.append(sent)
        if said:
            self.flush()
        for sent in said:
            sent.set()


def own_beat() -> dict[str, Any]:
    """What this rank does at the moment, as a message."""
    moment = phases.current()
    return {"phase": moment.phase, "step": moment.step, "progress": phases.progress()}
