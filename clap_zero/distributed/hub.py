"""The hub: all ranks tell rank 0 once a second what they do, and rank 0 tells all why the run is over.

Plain connections beside the process group, so that they work while every rank waits in a collective. The port and a
secret are exchanged through the process group's store, once it is there; before that there is the lobby. A hub that
cannot be set up is a warning: the run goes on, and a dead rank is noticed when a collective runs out of time.

The functions of this module are for the main thread and do nothing in a job of one process; the watchdog polls. Light:
no torch.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from clap_zero.distributed.hub_ends import Center, Outpost
from clap_zero.distributed.hub_station import Settings, Station
from clap_zero.distributed.listening import allow_files, listen
from clap_zero.distributed.lobby import Lobby, open_lobby

if TYPE_CHECKING:
    from clap_zero.distributed.collectives import Board

CONNECT_TIMEOUT_S = 5.0
CALLS, CALL_PAUSE_S = 3, 0.5

_BOARD_KEY = "hub"

_station: Station | Lobby | None = None
_lobby: Lobby | None = None


def enter_lobby(warn: Callable[[str], None]) -> Lobby | None:
    """Has this rank be known to rank 0, before anything is imported that takes time.

    Args:
        warn: Shows a line to people.

    Returns:
        What the watchdog has to poll until it is over; None in a job of one process.
    """
    global _station, _lobby
    _station = _lobby = open_lobby(warn)
    return _lobby


def told_absent() -> str:
    """Who has not come to the meeting, as far as this rank knows; empty where it knows nothing."""
    return "" if _lobby is None else _lobby.told_absent()


def open_hub(
    settings: Settings, *, board: Board, address: str, one_host: bool, warn: Callable[[str], None]
) -> Station | None:
    """Sets up this rank's end. Collective: all ranks must call; none waits for another but for rank 0's address.

    Args:
        settings: Who this rank is and how patient the hub is.
        board: Where rank 0 leaves its port and the secret for the others.
        address: Name or address under which all ranks reach rank 0's machine.
        one_host: Whether all ranks are on one machine.
        warn: Shows a line to people.

    Returns:
        What the watchdog has to poll; None if the hub could not be set up.
    """
    global _station
    try:
        opened = _open_center(settings, board, address, one_host, warn) if settings.rank == 0 else None
        _station = opened if settings.rank == 0 else _call_center(settings, board, address)
    except (OSError, ValueError, KeyError) as error:
        # Rank 0 itself says for all which ranks it does not hear.
        if settings.rank == 0:
            warn(
                f"clap_zero: warning: the ranks cannot watch each other ({error}): the death of one is noticed only "
                "when a collective runs out of time (distributed.timeout_s)"
            )
        _station = None
    return _station


def announce_failure(text: str, *, exit_code: int) -> None:
    """Tells the others that this rank ends with an error, and with which, before it does.

    Args:
        text: Where and what, in one line: `in backward of step 12: ...`.
        exit_code: What the process will end with.
    """
    if _station is not None:
        _station.fail(text, exit_code=exit_code)


def say_goodbye() -> None:
    """Tells the others that this rank has come to the end of the run, or of one that a signal stopped."""
    if _station is not None:
        _station.goodbye()


def close_hub() -> None:
    """Forgets this rank's end after its failure. Its connections stay: their end would be taken for a death."""
    global _station
    _station = None


def _open_center(settings: Settings, board: Board, address: str, one_host: bool, warn: Callable[[str], None]) -> Center:
    allow_files()
    try:
        listener = listen(address, one_host=one_host)
        token = secrets.token_hex(32)
        center = Center(settings, listener=listener, token=token, warn=warn)
    except (OSError, ValueError):
        board.put(_BOARD_KEY, "{}")
        raise
    board.put(_BOARD_KEY, json.dumps({"port": listener.getsockname()[1], "token": token, "host": settings.host}))
    return center


def _call_center(settings: Settings, board: Board, address: str) -> Outpost:
    """Connects to rank 0.

    Raises:
        OSError: It cannot be reached.
        KeyError: It has no hub.
    """
    told = json.loads(board.get(_BOARD_KEY))
    connection = _connected(address, told["port"])
    return Outpost(settings, connection=connection, token=told["token"], center_host=told["host"])


def _connected(address: str, port: int) -> socket.socket:
    """A connection to rank 0, which thousands may call at the same time."""
    for _ in range(CALLS - 1):
        with contextlib.suppress(OSError):
            return socket.create_connection((address, port), timeout=CONNECT_TIMEOUT_S)
        time.sleep(CALL_PAUSE_S)
    return socket.create_connection((address, port), timeout=CONNECT_TIMEOUT_S)
