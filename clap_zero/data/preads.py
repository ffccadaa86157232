"""Reading from open files at a place."""

from __future__ import annotations

import os

_WINDOW_BYTES = 4_096


def pread_all(descriptor: int, size_bytes: int, offset: int) -> bytes:
    """Reads from an open file: fewer bytes only at its end. Network file systems may give less than was asked for."""
    data = os.pread(descriptor, size_bytes, offset)
    while len(data) < size_bytes:
        more = os.pread(descriptor, size_bytes - len(data), offset + len(data))
        if not more:
            break
        data += more
    return data


class Window:
    """Reads a file in pieces of a few headers: those of a pair stand close together where its caption is short.

    Args:
        descriptor: the open file.
        end: its size in bytes.
    """

    def __init__(self, descriptor: int, end: int) -> None:
        self._descriptor, self._end, self._start, self._data = descriptor, end, 0, b""

    def read(self, offset: int, size_bytes: int) -> bytes:
        """Bytes at an offset, fewer at the end of the file."""
        first = offset - self._start
        if first < 0 or first + size_bytes > len(self._data):
            if size_bytes >= _WINDOW_BYTES:
                return pread_all(self._descriptor, size_bytes, offset)
            length = max(0, min(_WINDOW_BYTES, self._end - offset))
            self._start, self._data, first = offset, pread_all(self._descriptor, length, offset), 0
        return self._data[first : first + size_bytes]
