"""Lines of JSON over one connection between two ranks, without ever waiting for the other side.

Nothing that comes in is trusted: a line that is too long or no JSON object ends the connection.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Mapping
from typing import Any

MAX_LINE_BYTES = 64 * 1024
MAX_UNSENT_BYTES = 1024 * 1024
"""With so much unsent nothing more is said to a side. Whether it is gone is for its missing beats to tell."""

_CHUNK_BYTES = 64 * 1024


class ProtocolError(Exception):
    """The other side sent something that no rank sends."""


class Line:
    """One connection.

    Attributes:
        closed: Nothing more will come: the other side's process has ended, or the connection broke.
    """

    def __init__(self, connection: socket.socket) -> None:
        """Args:
        connection: Connected; this object owns it from now on.
        """
        connection.setblocking(False)
        with contextlib.suppress(OSError):  # a pair of unix sockets has no such option
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._received = b""
        self._unsent = b""
        self.closed = False

    def fileno(self) -> int:
        """For `select`."""
        return self._socket.fileno()

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends a message, or keeps what the network does not take yet for `flush`."""
        self.send_encoded(encoded(message))

    def send_encoded(self, line: bytes) -> None:
        """The same for what `encoded` made; dropped where the other side has read nothing for very long."""
        if not self.closed and len(self._unsent) <= MAX_UNSENT_BYTES:
            self._unsent += line
        self.flush()

    def flush(self) -> bool:
        """Sends what is left over.

        Returns:
            Whether all is sent, or nothing can be sent any more.
        """
        while self._unsent and not self.closed:
            try:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
            except (BlockingIOError, InterruptedError):
                return False
            except OSError:
                # What came before the break is still to be read: the end is told by `receive`.
                self._unsent = b""
        return True

    def receive(self) -> list[dict[str, Any]]:
        """All messages that have come; sets `closed` at the end of the connection.

        Raises:
            ProtocolError: a line is longer than MAX_LINE_BYTES or no JSON object.
        """
        while not self.closed:
            try:
                chunk = self._socket.recv(_CHUNK_BYTES)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                chunk = b""
            if not chunk:
                self.close()
            self._received += chunk
            if len(self._received) > 2 * MAX_LINE_BYTES:
                break  # the rest at the next call: one side cannot keep this one reading for ever
        *lines, self._received = self._received.split(b"\n")
        if any(len(line) > MAX_LINE_BYTES for line in (*lines, self._received)):
            raise ProtocolError(f"a line of more than {MAX_LINE_BYTES} bytes")
        return [_parsed(line) for line in lines]

    def close(self) -> None:
        """Ends the connection."""
        self.closed = True
        self._socket.close()


def encoded(message: Mapping[str, Any]) -> bytes:
    """A message as it goes over a line."""
    return json.dumps(message).encode() + b"\n"


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ProtocolError("a line that is no JSON") from error
    if not isinstance(message, dict):
        raise ProtocolError("a line that is no JSON object")
    return message


def text_of(message: Mapping[str, Any], key: str, *, longest: int = 4000) -> str:
    """A text of a message, printable and bounded; empty where there is none."""
    value = message.get(key)
    if not isinstance(value, str):
        return ""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in value[:longest])


def number_of(message: Mapping[str, Any], key: str, *, default: int = 0) -> int:
    """A whole number of a message; `default` where there is none."""
    value = message.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else default
