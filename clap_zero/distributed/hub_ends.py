"""The two ends of the hub: rank 0, which all others call, and one of these."""

from __future__ import annotations

import hmac
import os
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from clap_zero.distributed.hub_judge import Verdict, told_ranks
from clap_zero.distributed.hub_messages import Line, number_of, text_of
from clap_zero.distributed.hub_station import Settings, Station, own_beat

HELLO_TIMEOUT_S = 20.0
"""A connection that has not said who it is after so long is closed."""

JOIN_TIMEOUT_S = 20.0
"""Ranks that have not called rank 0 after so long are named in a warning."""

STACKS_TIMEOUT_S = 6.0
"""How long rank 0 waits for the stacks of a run that hangs."""

MOST_UNKNOWN = 256
"""Connections that may be open without having said who they are, where there are no more ranks than that."""

MOST_ACCEPTED = 64
"""Calls that are taken in one go: those that were taken before are heard in between."""

NO_DESCRIPTORS_S = 1.0
"""Pause before another call is taken where the process may open no more files."""


class Center(Station):
    """Rank 0's end: hears all ranks, and tells all why the run is over.

    Attributes:
        missing: Ranks that have not called yet.
    """

    def __init__(self, settings: Settings, *, listener: socket.socket, token: str, warn: Callable[[str], None]) -> None:
        """Args:
        settings: Who this rank is and how patient the hub is.
        listener: Bound; the other ranks know its port.
        token: What a rank has to know.
        warn: Shows a line to people.
        """
        super().__init__(settings)
        self._token, self._warn = token, warn
        self._unknown: dict[Line, float] = {}
        self._ranks: dict[Line, int] = {}
        self.missing = set(range(1, settings.size))
        self._has_warned = False
        self._listens_again: float | None = None
        self._opened = time.monotonic()
        self._stacks_until: float | None = None
        self._stacks_from: set[int] = set()
        self._listener = listener
        listener.setblocking(False)
        self.selector.register(listener, selectors.EVENT_READ)

    def lines(self) -> list[Line]:
        return list(self._ranks)

    def hear(self, source: Any) -> None:
        if source is self._listener:
            self._accept()
            return
        messages = self.receive(source)
        for message in messages:
            if source in self._unknown:
                self._welcome(source, message)
            if source not in self._ranks:
                break
            rank = self._ranks[source]
            self.understand(rank, message)
            if "goodbye" in message:
                source.send({"heard": True})
            if "stack" in message:
                self._take_stack(rank, message)
        if source.closed:
            self._unknown.pop(source, None)
            rank = self._ranks.pop(source, -1)
            if rank > 0:
                self.judge.lose(rank)

    def decide(self) -> Verdict | None:
        self._look_for_missing()
        verdict = self.judge.verdict() or self._hang()
        if verdict is not None:
            self.say({"verdict": verdict.cause, "rank": verdict.rank})
            self.flush()
        return verdict

    def close(self) -> None:
        """Ends all connections."""
        for line in self._unknown:
            line.close()
        super().close()
        self._listener.close()

    def _accept(self) -> None:
        for _ in range(MOST_ACCEPTED):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):  # none left, or it is gone already
                return
            except OSError as error:  # no descriptors: the listener would be ready again at once, for ever
                self.selector.unregister(self._listener)
                if self._listens_again is None:
                    self._warn(f"clap_zero: warning: rank 0 cannot take the call of a rank now: {error}")
                self._listens_again = time.monotonic() + NO_DESCRIPTORS_S
                return
            if len(self._unknown) >= max(MOST_UNKNOWN, self.settings.size):
                self._drop(next(iter(self._unknown)))  # the oldest: a rank says who it is at once
            line = Line(connection)
            self._unknown[line] = time.monotonic()
            self.selector.register(line, selectors.EVENT_READ)

    def _welcome(self, line: Line, message: Mapping[str, Any]) -> None:
        """Takes a rank in that knows the token, and closes the line to anybody else."""
        rank = number_of(message, "hello", default=-1)
        if rank in self.missing and hmac.compare_digest(text_of(message, "token").encode(), self._token.encode()):
            self.missing.discard(rank)
            self._unknown.pop(line, None)
            self._ranks[line] = rank
            line.send({"welcome": True, "host": self.settings.host} | own_beat())
            self.judge.join(rank, host=text_of(message, "host", longest=200), pid=number_of(message, "pid"))
            self.judge.is_blind = self._has_warned and bool(self.missing)
        else:
            self._drop(line)

    def _drop(self, line: Line) -> None:
        self._unknown.pop(line, None)
        self.forget(line)

    def _drop_strangers(self) -> None:
        now = time.monotonic()
        for line in [line for line, since in self._unknown.items() if now - since > HELLO_TIMEOUT_S]:
            self._drop(line)
        if self._listens_again is not None and now > self._listens_again:
            self._listens_again = float("inf")
            self.selector.register(self._listener, selectors.EVENT_READ)

    def _look_for_missing(self) -> None:
        self._drop_strangers()
        if self.missing and not self._has_warned and time.monotonic() - self._opened > JOIN_TIMEOUT_S:
            ranks = told_ranks(sorted(self.missing))
            self._has_warned = self.judge.is_blind = True
            self._warn(
                f"clap_zero: warning: {ranks} cannot reach port {self._listener.getsockname()[1]} of this host (a "
                "firewall?) or died before: until it calls, its death or a hang is noticed only when a collective "
                "runs out of time "
                "(distributed.timeout_s)"
            )

    def _hang(self) -> Verdict | None:
        """Asks for stacks when the run hangs; gives the verdict when they are here."""
        if not self.judge.hangs():
            self._stacks_until = None
            return None
        now = time.monotonic()
        if self._stacks_until is None:
            self._stacks_until = now + STACKS_TIMEOUT_S
            self._stacks_from = set()
            self.say({"stacks": True})
            self.flush()
            self._take_stack(0, self.own_stack())
        asked = {rank for rank, peer in self.judge.peers.items() if peer.watched}
        if asked <= self._stacks_from or now > self._stacks_until:
            return self.judge.hang(str(self.settings.stacks))
        return None

    def _take_stack(self, rank: int, message: Mapping[str, Any]) -> None:
        self._stacks_from.add(rank)
        peer = self.judge.peers[rank]
        peer.frames, peer.waits = text_of(message, "stack"), message.get("waits") is True


class Outpost(Station):
    """The end of any other rank: hears rank 0 alone.

    Attributes:
        is_welcome: Whether rank 0 has taken the call.
    """

    def __init__(self, settings: Settings, *, connection: socket.socket, token: str, center_host: str) -> None:
        """Args:
        settings: Who this rank is and how patient the hub is.
        connection: Connected to rank 0.
        token: What rank 0 wants to hear.
        center_host: Name of rank 0's machine.
        """
        super().__init__(settings)
        self._line = Line(connection)
        self._verdict: Verdict | None = None
        self.is_welcome = False
        self.selector.register(self._line, selectors.EVENT_READ)
        self.judge.join(0, host=center_host, pid=0)
        hello = {"hello": settings.rank, "token": token, "host": settings.host, "pid": os.getpid()}
        self._line.send(hello | own_beat())

    def lines(self) -> list[Line]:
        return [] if self._line.closed else [self._line]

    def hear(self, source: Any) -> None:
        for message in self.receive(source):
            self.understand(0, message)
            if "welcome" in message:
                self.is_welcome = True
                self.judge.peers[0].host = text_of(message, "host", longest=200) or self.judge.peers[0].host
            if "heard" in message:
                self.goodbye_heard.set()
            if "verdict" in message:
                self._has_news = True
                self._verdict = self._verdict or Verdict(
                    text_of(message, "verdict"),
                    number_of(message, "rank", default=-1),
                    is_told=True,
                )
            if "stacks" in message:
                self._line.send(self.own_stack())
        if self._line.closed:
            if not self.is_welcome:  # rank 0 did not take the call: it says so, and nobody has died of that
                self.judge.unwatch(0)
            self.judge.lose(0)
            self.goodbye_heard.set()

    def decide(self) -> Verdict | None:
        # A hang is rank 0's to judge: it alone knows what all ranks do. After its goodbye each looks at itself.
        if self.judge.peers[0].goodbye and self.judge.hangs():
            return self.judge.hang("none were asked for, rank 0 has ended")
        return self._verdict or self.judge.verdict()
