"""What a launcher leaves on disks, and takes away when it ends.

Each file and folder is locked as long as its launcher lives, so that a later one knows those of killed launchers, in
containers that share a disk and a host name, but no process ids, too.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType

_kept: dict[Path, int] = {}


def keep(make: Callable[[], Path]) -> Path:
    """Make a file or folder that is removed when this process ends.

    Args:
        make: Makes it under a new name; called once more where a launcher that clears away was faster than our lock.
    """
    if not _kept:
        atexit.register(remove_all)
    while True:
        path = make()
        descriptor = _open(path)
        with contextlib.suppress(OSError):  # a disk without locks: then nobody else removes it, either
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_nlink:
            _kept[path] = descriptor
            return path
        os.close(descriptor)


def remove_abandoned(paths: Iterable[Path]) -> None:
    """Remove what no living launcher keeps. What belongs to another user, or cannot be locked, stays."""
    for path in paths:
        with contextlib.suppress(OSError):
            descriptor = _open(path)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(path)
            finally:
                os.close(descriptor)


def remove_all() -> None:
    """Remove what this process keeps. Needed only before an end that skips `atexit`."""
    for path, descriptor in _kept.items():
        _remove(path)
        os.close(descriptor)
    _kept.clear()


def remove_on_signals() -> None:
    """Have the signals that end a process by default end it in order; a handler that is there stays."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _end)


def _end(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
