"""Opening files that users point at: a named pipe or a device among them must not hang whoever opens it."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class NotAFileError(OSError):
    """What is there is no regular file.

    Attributes:
        kind: what it is, "a named pipe" for example.
    """

    def __init__(self, kind: str, path: str) -> None:
        super().__init__(errno.EINVAL, f"is {kind}, not a file", path)
        self.kind = kind


def open_regular(path: str | Path) -> int:
    """Opens a regular file for reading and returns its descriptor; never waits for somebody to write.

    Raises:
        NotAFileError: it is something else.
        OSError: it cannot be opened.
    """
    # Without O_NONBLOCK the opening of a named pipe waits for its writer. To regular files it means nothing.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    raise NotAFileError(next((name for is_kind, name in _KINDS if is_kind(mode)), "something else"), str(path))


def read_text(path: str | Path, *, encoding: str = "utf-8") -> str:
    """The text of a regular file.

    Raises:
        NotAFileError: it is something else.
        OSError: it cannot be read.
        ValueError: it is not in this encoding.
    """
    with os.fdopen(open_regular(path), encoding=encoding) as file:
        return file.read()
