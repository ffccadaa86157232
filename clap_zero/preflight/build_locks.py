"""Locks that a killed compilation of DeepSpeed's kernels left: every later start would wait for them for ever.

To most versions of torch a file `lock` that is there is held. Such a file is removed when no process here has it open
and nothing around it moved for ten minutes; on a disk that other machines may use, whose processes do not show here,
it is told after an hour, and stays. Newer versions ask the kernel who holds it: a file left over does no harm.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from clap_zero.preflight.findings import Finding

STALE_AFTER_S = 600.0
SHARED_STALE_AFTER_S = 3600.0
_LOCK = "lock"


def find_locks(root: Path) -> list[Path]:
    """The lock files below an extensions directory: `NAME/lock`, or `py311_cu130/NAME/lock`."""
    found: list[Path] = []
    for pattern in (f"*/{_LOCK}", f"*/*/{_LOCK}"):
        with contextlib.suppress(OSError):
            found += sorted(root.glob(pattern))
    return found


def torch_asks_the_kernel() -> bool:
    """Whether the installed torch takes its build locks from the kernel; read from its source, without importing it."""
    try:
        folder = importlib.metadata.distribution("torch").locate_file("torch/utils")
        return "FileBaton" not in Path(str(folder), "cpp_extension.py").read_text()
    except (importlib.metadata.PackageNotFoundError, OSError):
        return False


def clear_stale_locks(root: Path, *, kernel_locks: bool, shared: bool) -> Iterator[Finding]:
    """Removes what is stale, and tells it; a lock that looks alive stays.

    Args:
        root: TORCH_EXTENSIONS_DIR, or torch's default for it.
        kernel_locks: A file that nobody holds does no harm, see `torch_asks_the_kernel`.
        shared: Other machines may compile there.
    """
    locks = find_locks(root)
    now = clock_of(root) if locks else 0.0
    for path in locks:
        age_s = _age_s(path, now)
        if age_s < (SHARED_STALE_AFTER_S if shared else STALE_AFTER_S):
            continue
        try:
            stale = _is_stale(path, kernel_locks=kernel_locks, remove=not shared)
        except FileNotFoundError:
            continue  # another rank was quicker
        except OSError as error:
            yield Finding("warning", f"the build lock {path} is {age_s / 60:.0f} min old, but: {error.strerror}; rm it")
            continue
        if stale and shared:
            text = f"the build lock {path} is {age_s / 60:.0f} min old: if no machine compiles there, rm it"
            yield Finding("warning", text)
        elif stale:
            yield Finding("told", f"removed the build lock {path}: {age_s / 60:.0f} min old, and no process holds it")


def clock_of(directory: Path) -> float:
    """Seconds since the epoch by the clock that dates files there: a file server has its own."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(b"x")
            file.flush()
            os.fsync(file.fileno())
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return time.time()


def _age_s(path: Path, now: float) -> float:
    """Seconds since anything in the lock's folder changed: a compilation writes there all the time."""
    times = [0.0]
    for one in (path, *path.parent.glob("*")):
        with contextlib.suppress(OSError):
            times.append(one.stat().st_mtime)
    return now - max(times)


def _is_stale(path: Path, *, kernel_locks: bool, remove: bool) -> bool:
    """Whether nobody holds the file and it does harm; then it may be removed at once. Raises OSError."""
    if _is_open_somewhere(path):
        return False
    descriptor = os.open(path, os.O_RDWR)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # no such locks on this file system, so that torch, too, goes by the file's being there
            kernel_locks = False
        if kernel_locks:
            return False
        if remove:
            path.unlink()
        return True
    finally:
        os.close(descriptor)


def _is_open_somewhere(path: Path) -> bool:
    """Whether a process of this machine that we may look into has the file open."""
    wanted = path.stat()
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal():
            continue
        with contextlib.suppress(OSError):  # gone meanwhile, or another user's
            for link in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    there = link.stat()
                    if (there.st_dev, there.st_ino) == (wanted.st_dev, wanted.st_ino):
                        return True
    return False
