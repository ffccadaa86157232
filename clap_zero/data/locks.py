"""Locks on files that many processes share. The kernel gives them back when their holder dies, however it dies."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

_POLL_S = 0.02


@contextlib.contextmanager
def locked(path: Path, *, patient: Callable[[], bool] = lambda: True) -> Iterator[bool]:
    """Holds the lock of a file, which is made where it is missing.

    Args:
        path: the file; it is never removed, or two could hold "the" lock.
        patient: asked while another holds it; False gives up.

    Yields:
        Whether the lock is held.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        held = try_lock(descriptor)
        while not held and patient():
            time.sleep(_POLL_S)
            held = try_lock(descriptor)
        yield held
    finally:
        os.close(descriptor)


def try_lock(descriptor: int) -> bool:
    """Takes the lock of an open file if nobody else has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
