"""Downloaded shards on the local disk: one directory for all processes of a machine, with a size cap.

A file's name is a hash of where it comes from and of its version there, so a shard that has changed is another file.
It appears when it is complete. One process downloads it, the others wait. What is downloaded right now has a name that
says how much room it may take, and a lock that shows whether its maker is alive: room is given before the bytes come,
so the cap holds at every moment, and what a killed process leaves is removed by the next one. What does not tell its
size (a pipe) gets an eighth of the cap. The file that was used longest ago goes first. Readers that have it open are
not disturbed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from clap_zero.data.locks import locked, try_lock
from clap_zero.data.places import ReadPolicy, is_pipe, shown
from clap_zero.data.remote import Info, Remote
from clap_zero.data.source_errors import TooLargeError, free_bytes, is_disk_full
from clap_zero.errors import DataError

_ENTRY = re.compile(r"[0-9a-f]{40}")
_PART = re.compile(r"part-[0-9a-f]{32}-(\d+)")
_POLL_S = 0.05
_USED_EVERY_S = 10.0
_UNKNOWN_SHARE = 8
_GRACE_S = 60.0


@dataclass(frozen=True)
class _File:
    path: Path
    size_bytes: int
    used: float


class ShardCache:
    """Files of remote places as local ones. Its methods may be called from several threads.

    Args:
        remote: reads them.
        policy: directory and cap.
    """

    def __init__(self, remote: Remote, policy: ReadPolicy) -> None:
        self._remote, self._policy = remote, policy
        self._directory = policy.cache_path
        self._lock = threading.Lock()
        self._names: dict[str, str] = {}
        self._used: dict[str, float] = {}
        self.num_downloads: dict[str, int] = {}

    def open(self, url: str) -> tuple[int, str]:
        """Opens a file, downloaded if need be.

        Args:
            url: the file, or a pipe.

        Returns:
            A descriptor, which the caller closes, and the version of what it holds.

        Raises:
            SourceError: it cannot be had.
            DataError: there is no room for it, or the cache cannot be written.
        """
        with self._lock:
            name = self._names.get(url)
        if name is not None:
            with contextlib.suppress(FileNotFoundError):
                return self._use(name), name
        info = Info(None, "") if is_pipe(url) else self._remote.info(url)
        name = hashlib.sha256(f"{shown(url)}\0{_whole(url)}\0{info.version}".encode("utf-8", "replace")).hexdigest()[
            :40
        ]
        descriptor = self._get(url, name, info)
        with self._lock:
            self._names[url] = name
        return descriptor, name

    def _use(self, name: str) -> int:
        """Opens an entry and marks it as used."""
        path = self._directory / name
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        now = time.monotonic()
        if now - self._used.get(name, -_USED_EVERY_S) >= _USED_EVERY_S:
            self._used[name] = now
            with contextlib.suppress(OSError):  # a cache that somebody else owns is still read
                os.utime(path)
        return descriptor

    def _get(self, url: str, name: str, info: Info) -> int:
        try:
            (self._directory / "locks").mkdir(mode=0o700, parents=True, exist_ok=True)
            # A fixed set of locks: they need no removal. Two files that share one wait for each other, no more.
            with locked(self._directory / "locks" / name[:3], patient=_Patience(self._directory, self._policy)):
                with contextlib.suppress(FileNotFoundError):
                    descriptor = self._use(name)
                    if info.size_bytes is None or os.fstat(descriptor).st_size == info.size_bytes:
                        return descriptor
                    os.close(descriptor)  # a machine that crashed may leave a file without its bytes
                return self._download(url, name, info)
        except OSError as error:
            if is_disk_full(error):
                raise DataError(self._full(url)) from error
            raise DataError(
                f"the cache {self._directory} cannot be used: {error.strerror or error}: set data.cache_dir"
            ) from error

    def _download(self, url: str, name: str, info: Info) -> int:
        """Downloads into a part file and gives it its name. Returns it open."""
        cap, room_bytes = self._policy.cache_bytes, info.size_bytes
        if room_bytes is None:
            room_bytes = min(cap // _UNKNOWN_SHARE, free_bytes(self._directory) // 2)
        if room_bytes > cap:
            raise DataError(self._too_large(url, str(room_bytes)))
        with self._reserved(url, room_bytes) as part:
            try:
                self._remote.fetch(url, part, size_bytes=info.size_bytes, max_bytes=room_bytes)
            except TooLargeError:
                by_cap = room_bytes == cap // _UNKNOWN_SHARE
                message = self._too_large(url, f"more than {room_bytes}") if by_cap else self._full(url)
                raise DataError(message) from None
            self.num_downloads[url] = self.num_downloads.get(url, 0) + 1
            descriptor = os.open(part, os.O_RDONLY | os.O_CLOEXEC)
            with self._exclusive():
                part.rename(self._directory / name)
        return descriptor

    @contextlib.contextmanager
    def _reserved(self, url: str, size_bytes: int) -> Iterator[Path]:
        """A part file with room for `size_bytes`; removed in the end if it still has this name."""
        part = self._directory / f"part-{uuid.uuid4().hex}-{size_bytes}"
        patience = _Patience(self._directory, self._policy)
        while True:
            with self._exclusive():
                if self._make_room(size_bytes):
                    # The lock of the part shows others that its maker lives.
                    descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                    try_lock(descriptor)
                    break
            if not patience():
                raise DataError(self._full(url))
            time.sleep(_POLL_S)
        try:
            yield part
        finally:
            os.close(descriptor)
            part.unlink(missing_ok=True)

    def _make_room(self, size_bytes: int) -> bool:
        """Removes what was used longest ago until there is room. Only while the lock of the directory is held.

        Returns:
            Whether there is room: downloads of others may take it, but they end.

        Raises:
            OSError: (ENOSPC) the disk is full of other things.
        """
        files, taken, coming = self._files()
        free = free_bytes(self._directory) - coming
        victims = []
        for file in sorted(files, key=lambda file: file.used):
            if taken + size_bytes <= self._policy.cache_bytes and size_bytes <= free:
                break
            victims.append(file.path)
            taken, free = taken - file.size_bytes, free + file.size_bytes
        if size_bytes > free and coming == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if taken + size_bytes > self._policy.cache_bytes or size_bytes > free:
            return False  # nothing is removed for what does not fit all the same
        for path in victims:
            path.unlink(missing_ok=True)
        return True

    def _files(self) -> tuple[list[_File], int, int]:
        """Complete files, the bytes that they and the running downloads take, and those of them that are still to come.

        Parts whose makers are dead are removed.
        """
        files, taken, coming = [], 0, 0
        for entry in os.scandir(self._directory):
            part = _PART.fullmatch(entry.name)
            if part is None and _ENTRY.fullmatch(entry.name) is None:
                continue  # not ours
            with contextlib.suppress(FileNotFoundError):
                if part is not None and _is_dead(Path(entry.path)):
                    Path(entry.path).unlink(missing_ok=True)
                    continue
                size = entry.stat().st_size
                missing = max(0, int(part.group(1)) - size) if part is not None else 0
                taken, coming = taken + size + missing, coming + missing
                if part is None:
                    files.append(_File(Path(entry.path), size, entry.stat().st_mtime))
        return files, taken, coming

    def _exclusive(self) -> contextlib.AbstractContextManager[bool]:
        return locked(self._directory / "locks" / "directory")

    def _full(self, url: str) -> str:
        return (
            f"no room for {shown(url)} in the cache {self._directory}: its disk has {free_bytes(self._directory)} "
            f"bytes left, data.cache_bytes is {self._policy.cache_bytes}: set data.cache_dir to a larger disk"
        )

    def _too_large(self, url: str, size: str) -> str:
        return (
            f"{shown(url)} has {size} bytes, the cache takes {self._policy.cache_bytes}: raise data.cache_bytes "
            f"(several times the size of a shard is needed), or have single samples read: that takes spans.npy beside "
            f"the shards (clap-zero check writes it) and a server that gives parts of files"
        )


class _Patience:
    """How long to wait for others: as long as something comes in the cache, and a while longer than they may stall."""

    def __init__(self, directory: Path, policy: ReadPolicy) -> None:
        self._directory = directory
        self._allowed_s = policy.timeout_s * (policy.retries + 2) + _GRACE_S
        self._since, self._seen, self._looked = time.monotonic(), -1, 0.0

    def __call__(self) -> bool:
        now = time.monotonic()
        if now - self._looked > 1:
            self._looked, seen = now, self._bytes()
            if seen != self._seen:
                self._seen, self._since = seen, now
        return now - self._since < self._allowed_s

    def _bytes(self) -> int:
        total = 0
        for entry in os.scandir(self._directory):
            with contextlib.suppress(FileNotFoundError):
                total += entry.stat().st_size
        return total


def _whole(url: str) -> str:
    """What tells commands apart: they are shown without their arguments."""
    return hashlib.sha256(url.encode("utf-8", "replace")).hexdigest() if is_pipe(url) else ""


def _is_dead(part: Path) -> bool:
    """Whether nobody writes this part any more."""
    descriptor = os.open(part, os.O_RDWR | os.O_CLOEXEC)
    try:
        return try_lock(descriptor)
    finally:
        os.close(descriptor)
