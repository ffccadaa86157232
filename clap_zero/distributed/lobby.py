"""The lobby: the ranks watch each other from their first moment until they have met and the hub does.

Before they have met there is no store and no secret, and a rank may fail at the import of torch itself. So rank 0
listens on a port that follows from MASTER_PORT, and every rank calls it before it imports anything that takes time.
The kernel tells the end of a connection, also that of a host without power; nothing is judged by silence, since a rank
that loads libraries from a slow disk says nothing for long. What a stranger could do here is to end a job that starts,
which MASTER_PORT, as torch guards it, gives away already.

Where the lobby cannot be, a job starts as well: `distributed.start_timeout_s` limits the wait for the others.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from clap_zero import phases
from clap_zero.distributed.hub_ends import Center, Outpost
from clap_zero.distributed.hub_judge import Verdict, told_ranks
from clap_zero.distributed.hub_messages import Line
from clap_zero.distributed.hub_station import LEAVE_AFTER_S, MOST_TOLD, POST_TIMEOUT_S, Settings, Station
from clap_zero.distributed.listening import allow_files, listen
from clap_zero.distributed.place import attempt, meeting_address, meeting_port, read_launch_environment
from clap_zero.errors import LaunchError

FIRST_PORT, NUM_PORTS = 11_900, 8_000
"""Where lobbies are: below the ports that systems give to outgoing connections, and away from MASTER_PORTs."""

CALL_TIMEOUT_S, CALL_PAUSE_S, MOST_PAUSE_S = 5.0, 0.3, 2.0
SILENT_S = 30
"""A host that answers nothing for so long, its kernel included, is gone."""

TELL_S = 10.0
"""How long a rank that failed waits for those to come that do not know it yet: hosts do not start at the same time."""

WAY_S = 20.0
"""How long a rank that knows why the job ends may go on to the meeting: often it finds the same error itself."""

_ON_THE_WAY = ("start", "imports")
_HERE = ("localhost", "127.0.0.1", "::1")


def open_lobby(warn: Callable[[str], None]) -> Lobby | None:
    """This rank's end of the lobby. Returns at once.

    Args:
        warn: Shows a line to people.

    Returns:
        None in a job of one process, and where its variables are wrong, which is said at the meeting.
    """
    try:
        place = read_launch_environment()
        if place.size == 1:
            return None
        # Nobody is judged by silence here.
        settings = Settings(place.rank, place.size, socket.gethostname(), None, None, Path())
        return Lobby(settings, address=meeting_address(), port=lobby_port(meeting_port()), mark=attempt(), warn=warn)
    except LaunchError:
        return None


def lobby_port(port: int) -> int:
    """Where the lobby of the job that meets at `port` is."""
    return FIRST_PORT + port % NUM_PORTS


class Lobby:
    """One rank's end.

    Attributes:
        settings: Who this rank is.
        failing: `time.monotonic()` at which this rank said that it ends with an error, and its exit code.
        is_over: Whether nobody needs it any more: it is to be closed.
    """

    def __init__(self, settings: Settings, *, address: str, port: int, mark: str, warn: Callable[[str], None]) -> None:
        """Args:
        settings: Who this rank is.
        address: Where rank 0 is.
        port: Where its lobby is.
        mark: What tells this job from others.
        warn: Shows a line to people.
        """
        self.settings = settings
        self.failing: tuple[float, int] | None = None
        self.is_over = False
        self._address, self._port, self._mark, self._warn = address, port, mark, warn
        self._has_met = threading.Event()
        self._failure: dict[str, Any] | None = None
        self._told: Station | None = None
        self._station: Reception | Outpost | None = None
        self._opener = self._start_to_open()

    # ---- for the main thread

    def fail(self, text: str, *, exit_code: int) -> None:
        """Says that this rank ends with an error; waits up to TELL_S for those who are not there to hear it."""
        self.failing = (time.monotonic(), exit_code)
        self._failure = {"failing": text[:MOST_TOLD]}
        until = time.monotonic() + TELL_S
        while not self._all_know() and time.monotonic() < until:
            time.sleep(0.05)

    def goodbye(self) -> None:
        """Says that this rank ends in good order, before it has met the others: it was asked for help."""
        if self._station is not None:
            self._station.goodbye()

    def leave(self) -> None:
        """The hub watches from now on, here; rank 0 stays until it does so for all. Returns at once."""
        self._has_met.set()

    def told_absent(self) -> str:
        """Who has not come to the meeting, for the end of a line; empty where this rank does not know."""
        station = self._station
        if not isinstance(station, Reception):
            return ""
        known = list(station.judge.peers.values())  # at once: the watchdog's thread may add one
        peers = [peer for peer in known if peer.phase in _ON_THE_WAY]
        parts = [f"{peer.name} is still in {peer.place}" for peer in peers[:3]]
        if station.missing:
            hosts = sorted({peer.host for peer in known})
            came = f"{', '.join(hosts[:6])}{' and others' if len(hosts) > 6 else ''}"
            ranks = told_ranks(sorted(station.missing))
            parts.append(f"{ranks} never came, or cannot call port {self._port} (there are ranks on {came})")
        return "".join(f"; {part}" for part in parts)

    # ---- for the watchdog's thread

    def poll(self, timeout_s: float) -> Verdict | None:
        """One round; why the job ends, None while it goes on. Waits for up to `timeout_s` for something to come."""
        station = self._station
        if station is None:
            time.sleep(timeout_s)
            # Asked in this order: the opener may just have had its way.
            self.is_over = self._has_met.is_set() and not self._opener.is_alive() and self._station is None
            return None
        verdict = station.poll(timeout_s)
        if isinstance(station, Outpost) and not station.is_welcome and not station.lines():
            # Another job's, or another program: ours is not there yet.
            self._station = None
            station.close()
            self._opener = self._start_to_open()
            return None
        if self._failure is not None and self._told is not station:
            self._tell_of_failure(station, self._failure)
        if self._has_met.is_set() and verdict is None:
            self.is_over = not isinstance(station, Reception) or station.is_empty
        return verdict

    def may_leave(self, since_s: float) -> bool:
        """Whether a rank that has known for so long why the job ends has nothing better to say or to do."""
        station = self._station
        on_its_way = phases.current().phase in _ON_THE_WAY
        if isinstance(station, Reception):
            # Those who come later would wait for this rank.
            return since_s > (WAY_S if on_its_way or station.missing else LEAVE_AFTER_S)
        return since_s > WAY_S or not on_its_way

    def say(self, message: Mapping[str, Any]) -> None:
        """Sends a message to whoever is there."""
        if self._station is not None:
            self._station.say(message)

    def flush(self) -> None:
        """Gives the network a moment to take what was said."""
        if self._station is not None:
            self._station.flush()

    def close(self) -> None:
        """Ends all connections; the others know that this rank has met them."""
        station, self._station = self._station, None
        if station is None:
            return
        station.say({"goodbye": True})
        station.flush()
        # A close with unread beats resets the connection: a goodbye that the network lost would not be sent again.
        until = time.monotonic() + POST_TIMEOUT_S
        try:
            while isinstance(station, Outpost) and station.is_welcome and time.monotonic() < until:
                if station.goodbye_heard.is_set():
                    break
                station.poll(0.05)
        finally:
            station.close()

    def _tell_of_failure(self, station: Reception | Outpost, failure: dict[str, Any]) -> None:
        if isinstance(station, Reception):
            station.last_words = failure
        station.say(failure)
        station.flush()
        self._told = station

    # ---- in a thread of its own, since names are looked up there, which may take long

    def _start_to_open(self) -> threading.Thread:
        work = self._listen if self.settings.rank == 0 else self._call
        opener = threading.Thread(target=work, name="clap_zero-lobby", daemon=True)
        opener.start()
        return opener

    def _listen(self) -> None:
        allow_files()
        try:
            listener = listen(self._address, one_host=self._address in _HERE, port=self._port)
        except OSError as error:
            self._warn(
                f"clap_zero: warning: port {self._port} of this host cannot be listened to ({error.strerror or error}):"
                " a rank that fails before all have met is noticed only after distributed.start_timeout_s"
            )
            return
        _keep_alive(listener)  # those that it accepts inherit it
        self._station = Reception(self.settings, listener=listener, token=self._mark, warn=self._warn)

    def _call(self) -> None:
        pause_s = CALL_PAUSE_S
        while not self._has_met.is_set():
            time.sleep(pause_s)
            pause_s = min(1.2 * pause_s, MOST_PAUSE_S)  # a thousand ranks may wait for rank 0
            with contextlib.suppress(OSError, ValueError):  # not there yet, behind a firewall, or no name at all
                connection = socket.create_connection((self._address, self._port), timeout=CALL_TIMEOUT_S)
                _keep_alive(connection)
                self._station = Outpost(
                    self.settings, connection=connection, token=self._mark, center_host=self._address
                )
                return

    def _all_know(self) -> bool:
        """Whether all who have to know of this rank's failure do, or it is too late for that."""
        station = self._station
        if station is None or self._told is not station:
            return False
        return not station.missing if isinstance(station, Reception) else station.is_welcome or not station.lines()


class Reception(Center):
    """Rank 0's end.

    Attributes:
        last_words: What rank 0 has said of its own failure, for those who come later.
    """

    last_words: Mapping[str, Any] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether no rank is left that has not met the others."""
        return all(peer.goodbye or peer.lost for peer in self.judge.peers.values() if peer.rank != 0)

    def _look_for_missing(self) -> None:
        """Those who cannot call are missed by nobody: the meeting waits for them."""
        self._drop_strangers()

    def _welcome(self, line: Line, message: Mapping[str, Any]) -> None:
        super()._welcome(line, message)
        if line in self._ranks and self.last_words is not None:
            line.send(self.last_words)


def _keep_alive(connection: socket.socket) -> None:
    """Have the kernel end a connection to a host that answers nothing for SILENT_S, whether or not anything is sent."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": SILENT_S * 1000}
    for name, value in options.items():
        if hasattr(socket, name):  # Linux has them all, but not each sandbox that calls itself so
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
