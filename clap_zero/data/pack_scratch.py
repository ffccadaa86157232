"""Directories in which a pack works until it is complete, and what is done with those of packs that were killed.

Several machines may pack into one directory of a shared file system. A leftover is removed only by the machine that
made it, once the process that made it is gone: names hold the host, its boot and the space of its process numbers,
because hosts and containers share names, and process numbers mean nothing elsewhere.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import secrets
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from clap_zero.errors import DataError

_PREFIX = ".packing-"
_MADE, _OLD = "made", "old"
"""Directories in a scratch directory: what is being made, and what it replaces. A split may have any name."""


@contextlib.contextmanager
def disk_errors_told(out: Path, end: str) -> Iterator[None]:
    """Tells what the disk refuses within the block in one line.

    Args:
        out: where it is written to.
        end: what has become of the data.

    Raises:
        DataError: instead of an OSError.
    """
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{out}: {error.strerror or error}" + (f" ({error.filename})" if error.filename else "") + f"; {end}"
        ) from error


@functools.cache
def machine() -> str:
    """Names this machine as it runs now: host, and a number that differs between boots and containers."""
    known = ""
    with contextlib.suppress(OSError):
        known += Path("/proc/sys/kernel/random/boot_id").read_text("utf-8")
        known += str(Path("/proc/self/ns/pid").readlink())
    return f"{socket.gethostname()}-{hashlib.sha256(known.encode()).hexdigest()[:8]}"


def scratch_name(pid: int) -> str:
    """The name of a process's scratch directory, another one each time."""
    return f"{_PREFIX}{machine()}-{pid}-{secrets.token_hex(4)}"


@contextlib.contextmanager
def scratch_directory(parent: Path) -> Iterator[Path]:
    """A directory in `parent` (on the same file system), empty but for `made` of it; afterwards it is gone, and
    `take_place` is undone where it was left in the middle."""
    remove_leftovers(parent)
    parent.mkdir(parents=True, exist_ok=True)
    scratch = parent / scratch_name(os.getpid())
    for directory in (_MADE, _OLD):
        (scratch / directory).mkdir(parents=True)
    try:
        yield scratch
    finally:
        _move_back(scratch)
        shutil.rmtree(scratch, ignore_errors=True)


def made_in(scratch: Path) -> Path:
    """Where a pack makes what `take_place` moves later."""
    return scratch / _MADE


def take_place(made: Path, target: Path, scratch: Path) -> None:
    """Moves `made` to `target`, which lies beside `scratch`; what was there waits in `scratch` for its end.

    Raises:
        OSError: something else was put at `target` meanwhile, or the file system refuses.
    """
    assert target.parent == scratch.parent
    if target.exists():
        target.rename(scratch / _OLD / target.name)
    made.rename(target)
    sync_directory(target.parent)


def remove_leftovers(parent: Path) -> None:
    """Removes what packs of this machine left when they were killed, once what they took away is back."""
    own = f"{_PREFIX}{machine()}-"
    for path in sorted(parent.glob(f"{_PREFIX}*")):
        pid = path.name.removeprefix(own).partition("-")[0]
        if path.name.startswith(own) and pid.isdigit() and not _is_alive(int(pid)):
            _move_back(path)
            shutil.rmtree(path, ignore_errors=True)


def leftovers(parent: Path) -> list[Path]:
    """Scratch directories that are there: of packs that run, or were killed on other machines."""
    return sorted(parent.glob(f"{_PREFIX}*"))


def sync_directory(directory: Path) -> None:
    """Has the names in a directory written to the disk, where its file system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _move_back(scratch: Path) -> None:
    """Puts back what was moved out of the way, and whose successor never came into its place."""
    for old in (scratch / _OLD).glob("*"):
        target = scratch.parent / old.name
        # Another pack of this machine may be putting the same back.
        with contextlib.suppress(FileNotFoundError):
            if not target.exists():
                old.rename(target)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # somebody else's
        return True
    return True
