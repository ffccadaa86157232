"""Whether a directory can be written, has room, and is the same one for everybody."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from clap_zero.preflight.findings import Finding

LEAST_FREE_BYTES = 100_000_000
"""Below it nothing may start: not even the log of a day."""
LOW_FREE_BYTES = 5_000_000_000
"""Below it a warning: one checkpoint of the default model with its optimizer takes 2 GB, and two are kept."""
SMALL_SHM_BYTES = 1_000_000_000
LEAST_TEMPORARY_BYTES = 4_000_000
"""Containers may have no more than a small disk in memory for temporary files: below it an error, else a warning."""
PROBE_BYTES = 1 << 20
_OWN_FILE_SYSTEMS = frozenset(
    {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "tmpfs", "ramfs", "overlay", "f2fs", "bcachefs", "jfs"}
)
MARK = ".clap_zero-nonce-"
"""Name of the file in which the first rank, or the doctor, leaves its token for the others."""


def nearest_directory(path: Path) -> Path:
    """The directory itself, or the nearest above it that is there."""
    path = Path(os.path.abspath(path.expanduser()))  # noqa: PTH100  (resolve() would follow links)
    return next((place for place in (path, *path.parents) if place.is_dir()), Path("/"))


def free_bytes(path: Path) -> int | None:
    """What may still be written there by this user; None where the file system does not say."""
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


def write_fault(directory: Path) -> str | None:
    """Why a file of 1 MiB cannot be written there; None where it can. Leaves nothing behind."""
    try:
        # A name of its own: all ranks do this at the same moment.
        descriptor, name = tempfile.mkstemp(prefix=".clap_zero-probe-", dir=directory)
    except OSError as error:
        return error.strerror or str(error)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
            os.fsync(descriptor)  # a full disk may say so only now
    except OSError as error:
        return error.strerror or str(error)
    finally:
        with contextlib.suppress(OSError):
            Path(name).unlink()
    return None


def check_directory(directory: Path, *, what: str, warn: bool = True) -> Iterator[Finding]:
    """Writes a probe and looks at the room that is left.

    Args:
        directory: An existing directory.
        what: What it is to the reader, such as "the run directory".
        warn: Whether little room is worth a warning.
    """
    free = free_bytes(directory)
    left = "" if free is None else f", {told_bytes(free)} free"
    fault = write_fault(directory)
    if fault is not None:
        yield Finding(
            "error",
            f"{what} {directory} cannot be written: {fault}{left}; expected: room for the run, "
            f"at least {told_bytes(LEAST_FREE_BYTES)}",
        )
    elif free is not None and free < LEAST_FREE_BYTES:
        yield Finding("error", f"{what} {directory} is full{left}; expected: at least {told_bytes(LEAST_FREE_BYTES)}")
    elif warn and free is not None and free < LOW_FREE_BYTES:
        yield Finding(
            "warning", f"{what} {directory} has little room{left}; checkpoints of the default model take 2 GB each"
        )


def check_temporary_directory(directory: Path) -> Iterator[Finding]:
    """As `check_directory`, for files that soon pass: a run needs next to nothing there."""
    what = "the directory for temporary files"
    free, fault = free_bytes(directory), write_fault(directory)
    left = "" if free is None else f", {told_bytes(free)} free"
    if fault is not None:
        yield Finding("error", f"{what} {directory} cannot be written: {fault}{left} (TMPDIR names another)")
    elif free is not None and free < LEAST_FREE_BYTES:
        full = free < LEAST_TEMPORARY_BYTES
        yield Finding(
            "error" if full else "warning",
            f"{what} {directory} {'is full' if full else 'has little room'}{left} (TMPDIR names another)",
        )


def may_be_shared(path: Path) -> bool:
    """Whether other machines may write there: its file system is none of those that one machine has for itself."""
    place = Path(os.path.realpath(path))
    best, kind = "", ""
    try:
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            before, _, after = line.partition(" - ")
            point = before.split()[4].replace("\\040", " ")
            if place.is_relative_to(point) and len(point) >= len(best):
                best, kind = point, after.split()[0]
    except (OSError, IndexError):
        return True
    return kind not in _OWN_FILE_SYSTEMS


def check_shared_memory(path: Path = Path("/dev/shm")) -> Iterator[Finding]:
    """Loader processes and gloo pass their data through it; containers come with 64 MB."""
    if not path.is_dir():
        yield Finding("warning", f"there is no {path}: loader processes may fail; --data.workers 0 does without")
        return
    total = shutil.disk_usage(path).total
    fault = write_fault(path)
    if fault is not None:
        yield Finding("error", f"shared memory {path} cannot be written: {fault}; expected: 1 MB at least")
    elif total < SMALL_SHM_BYTES:
        yield Finding(
            "warning",
            f"shared memory {path} has {told_bytes(total)}, {told_bytes(SMALL_SHM_BYTES)} are expected: give the "
            "container more (--shm-size, --ipc=host), or --data.workers 0",
        )


def leave_mark(directory: Path, token: str) -> Path:
    """Writes the token where the others look for it. Raises OSError."""
    path = directory / f"{MARK}{token}"
    path.write_text(token)
    return path


def sees_mark(directory: Path, token: str) -> bool:
    """Whether the token that somebody else left is here. Listing first refreshes what a network file system knows."""
    with contextlib.suppress(OSError):
        os.listdir(directory)  # noqa: PTH208
        return (directory / f"{MARK}{token}").read_text() == token
    return False


def told_bytes(size: int) -> str:
    """Such as 1.5 GB or 300 MB."""
    for unit, name in ((1_000_000_000_000, "TB"), (1_000_000_000, "GB"), (1_000_000, "MB")):
        if size >= unit:
            value = size / unit
            return f"{value:.0f} {name}" if value >= 10 or value == int(value) else f"{value:.1f} {name}"
    return f"{size / 1e6:.1f} MB"
