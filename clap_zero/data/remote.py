"""Reading from http(s), s3 and whatever fsspec covers: retried with back-off, watched for stalls, never without end.

Imported only where something remote is read. File systems are made when they are first needed, in the process that
needs them. Methods may be called from several threads.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from fsspec.callbacks import Callback

from clap_zero.data.pipes import PipeError, run_pipe
from clap_zero.data.places import ReadPolicy, host, is_pipe, protocol, shown
from clap_zero.data.source_errors import RangeError, SourceError, TooLargeError, explain, is_local
from clap_zero.data.systems import HTTP, Systems, call, call_http_part
from clap_zero.data.watch import MIN_BYTES_PER_S, Allowance, Progress, StalledError
from clap_zero.errors import DataError

T = TypeVar("T")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_SUSPECT_AFTER, _SUSPECT_TIMEOUT_S = 2, 10.0
"""A host that failed once gets less time, one that failed so often one attempt: other ranks do not wait for ever."""
_MAX_TEXT_BYTES = 1 << 30
_VERSION_KEYS = (
    "ETag", "etag", "Content-MD5", "md5Hash", "generation", "VersionId", "LastModified", "Last-Modified", "mtime",
    "updated", "last_modified", "blob_id", "oid",
)  # fmt: skip


@dataclass(frozen=True)
class Info:
    """What a source says about a file.

    Attributes:
        size_bytes: its size, where it says so.
        version: differs when the file has changed.
    """

    size_bytes: int | None
    version: str


class _Counter(Callback):
    """Counts what fsspec has read, and ends it when it becomes too much."""

    def __init__(self, progress: Progress, size_bytes: int | None, max_bytes: int | None) -> None:
        super().__init__()
        self._progress, self._size_bytes, self._max_bytes = progress, size_bytes, max_bytes

    def relative_update(self, inc: int = 1) -> None:
        self._progress.add(inc)
        if self._size_bytes is not None and self._progress.num_bytes > self._size_bytes:
            raise SourceError(f"sends more than the {self._size_bytes} bytes that it announced")
        if self._max_bytes is not None and self._progress.num_bytes > self._max_bytes:
            raise TooLargeError


class Remote:
    """Reads of remote places.

    A host (or bucket) of which a file could not be had gets a shorter timeout, and after two in a row one attempt only,
    until something of it comes again: a rank does not spend minutes on each shard of a host that is down.

    Args:
        policy: timeouts and retries.
    """

    def __init__(self, policy: ReadPolicy) -> None:
        self._policy = policy
        self._systems = Systems(policy.timeout_s)
        self._failures: dict[str, int] = {}

    def info(self, url: str) -> Info:
        """Size and version of a file.

        Raises:
            SourceError: it is not there, or the source does not answer.
        """

        def once(allowed: Allowance) -> Info:
            system, path = self._systems.of(url)
            found = call(system, "info", path, allowed=allowed)
            if found.get("type") == "directory":
                raise SourceError("is a directory, not a file", absent=True)
            size = found.get("size")
            marks = [str(found[key]) for key in _VERSION_KEYS if found.get(key)]
            return Info(size, f"{size} {marks[0] if marks else ''}")

        return self._try(url, once)

    def read(self, url: str, offset: int, length: int) -> bytes:
        """A part of a file, in one request.

        Raises:
            RangeError: the source gives whole files only, or the file ends before.
            SourceError: the source does not give it.
        """

        def once(allowed: Allowance) -> bytes:
            system, path = self._systems.of(url)
            part = (offset, offset + length)
            if protocol(url) in HTTP and system.async_impl:
                data = call_http_part(system, path, part, allowed)
            else:
                # It comes in one piece: no progress can be seen.
                longer = replace(allowed, timeout_s=allowed.timeout_s + length / MIN_BYTES_PER_S)
                data = call(system, "cat_file", path, start=part[0], end=part[1], allowed=longer)
            if len(data) > length:
                raise RangeError(whole_only=True)
            if len(data) < length:
                size = call(system, "info", path, allowed=allowed).get("size")
                if size is not None and size < part[1]:
                    raise RangeError(f"has {size} bytes, byte {part[1]} was asked for")
                raise SourceError(f"ended early: {len(data)} of {length} bytes")
            return data

        return self._try(url, once)

    def read_all(self, url: str) -> bytes:
        """A whole (small) file.

        Raises:
            SourceError: the source does not give it, or it is too large.
        """
        size = self.info(url).size_bytes
        if size is not None and size > _MAX_TEXT_BYTES:
            raise SourceError(f"has {size} bytes, more than {_MAX_TEXT_BYTES}", final=True)

        def once(allowed: Allowance) -> bytes:
            system, path = self._systems.of(url)
            longer = replace(allowed, timeout_s=allowed.timeout_s + (size or 0) / MIN_BYTES_PER_S)
            data = call(system, "cat_file", path, allowed=longer)
            if size is not None and len(data) != size:
                raise SourceError(f"ended early: {len(data)} of {size} bytes")
            return data

        return self._try(url, once)

    def names(self, url: str) -> list[str]:
        """Base names of the files in a directory, sorted; [] where there is none.

        Raises:
            SourceError: the source does not say.
        """

        def once(allowed: Allowance) -> list[str]:
            system, path = self._systems.of(url)
            found = call(system, "ls", path, allowed=allowed, detail=False)
            return sorted({str(name).partition("?")[0].rstrip("/").rsplit("/", 1)[-1] for name in found})

        try:
            return self._try(url, once)
        except SourceError as error:
            if error.absent:
                return []
            raise

    def fetch(self, url: str, path: Path, *, size_bytes: int | None, max_bytes: int | None = None) -> None:
        """Downloads a file, or runs a pipe.

        Args:
            url: what to fetch.
            path: where to write it; begun anew at every attempt.
            size_bytes: its size, where it is known; another one is an error.
            max_bytes: how much there is room for.

        Raises:
            SourceError: the source does not give it.
            TooLargeError: it is larger than `max_bytes`.
            OSError: it cannot be written.
            DataError: pipes are not allowed.
        """

        def once(allowed: Allowance) -> None:
            progress = Progress()
            counter = _Counter(progress, size_bytes, max_bytes)
            if is_pipe(url):
                with path.open("wb") as sink:
                    run_pipe(url, sink, counter.relative_update, allowed=allowed)
            else:
                system, place = self._systems.of(url)
                call(system, "get_file", place, str(path), callback=counter, progress=progress, allowed=allowed)
            came = path.stat().st_size
            if size_bytes is not None and came != size_bytes:
                what = "ended early" if came < size_bytes else "sends more than it announced"
                raise SourceError(f"{what}: {came} of {size_bytes} bytes")

        if is_pipe(url) and not self._policy.allow_pipe:
            raise DataError(f"{shown(url)} would run a command: allow it with --data.allow_pipe true")
        self._try(url, once)

    def _try(self, url: str, once: Callable[[Allowance], T]) -> T:
        """Does something with a source until it works, or the attempts are used up."""
        place = host(url)
        attempts, timeout_s = 1 + max(0, self._policy.retries), self._policy.timeout_s
        failures = self._failures.get(place, 0)
        if failures:
            timeout_s = min(timeout_s, _SUSPECT_TIMEOUT_S)
        if failures >= _SUSPECT_AFTER:
            attempts = 1
        until = time.monotonic() + self._policy.fetch_s
        for attempt in range(1, attempts + 1):
            try:
                result = once(Allowance(timeout_s, until))
            except SourceError as error:
                fault = error
            except (StalledError, PipeError) as error:
                fault = SourceError(str(error))
            except (DataError, TooLargeError):
                raise
            except Exception as error:
                # File systems raise whatever their libraries do.
                if is_local(error):
                    raise
                fault = explain(error, url)
                fault.__cause__ = error
            else:
                self._failures.pop(place, None)
                return result
            if fault.final:
                raise fault
            if time.monotonic() >= until:
                attempts = attempt
                break
            if attempt < attempts:
                pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (attempt - 1))
                time.sleep(pause_s * random.uniform(0.75, 1.25))  # readers that failed together do not return together
        self._failures[place] = self._failures.get(place, 0) + 1
        raise SourceError(f"{fault} ({attempts} attempts)" if attempts > 1 else str(fault)) from fault
