"""Remote shards for a reader: samples by range request, whole shards through the cache, both ahead of time.

Imported only where something remote is read.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any

from clap_zero.data.cache import ShardCache
from clap_zero.data.places import ReadPolicy, host, is_remote, local_path
from clap_zero.data.prefetch import Prefetcher
from clap_zero.data.regular import open_regular
from clap_zero.data.remote import Remote
from clap_zero.data.source_errors import RangeError, SourceError
from clap_zero.data.spans import SpansError, SpansRef, SpanTables

_FORGIVEN_AFTER_S = 600.0
_MAX_AHEAD_BYTES = 16 << 20
_LATER = object()


class RemoteShards:
    """Bytes of remote shards.

    A shard that could not be had is not asked for again for ten minutes: its samples fail at once.

    Args:
        policy: how to read.
        max_bytes: longest range that is read in one piece.

    Attributes:
        waited_s: how long callers waited here so far.
    """

    def __init__(self, policy: ReadPolicy, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._remote = Remote(policy)
        self._cache = ShardCache(self._remote, policy)
        self._tables = SpanTables(self._open_spans)
        self._prefetcher = Prefetcher()
        self._whole_only: set[str] = set()
        self._failed: dict[str, tuple[str, float]] = {}
        self.waited_s = 0.0

    def part(self, path: str, spans: SpansRef, sample_id: int) -> bytes | None:
        """The bytes of a sample's range; None where its members do not stand side by side.

        Raises:
            SpansError, RangeError: the range cannot be used: read the whole shard.
            SourceError: the shard cannot be had.
        """
        future = self._prefetcher.take((path, sample_id))
        self._check(path)
        if host(path) in self._whole_only:
            raise RangeError(whole_only=True)
        with self._waiting(path):
            data: Any = _LATER if future is None else future.result()
            return self._part(path, spans, sample_id) if data is _LATER else data

    def open(self, path: str) -> tuple[int, str]:
        """Opens the whole shard: a descriptor, which the caller closes, and its version.

        Raises:
            SourceError: the shard cannot be had.
            DataError: the cache cannot take it.
        """
        future = self._prefetcher.take((path, None))
        self._check(path)
        with self._waiting(path):
            if future is not None:
                future.result()
            return self._cache.open(path)

    def hint(self, path: str, spans: SpansRef | None, sample_id: int) -> None:
        """Starts to fetch a sample (without spans: its shard) in the background."""
        if path in self._failed:
            return
        if spans is None or host(path) in self._whole_only:
            self._prefetcher.hint((path, None), lambda: self._load(path))
        else:
            self._prefetcher.hint((path, sample_id), lambda: self._ahead(path, spans, sample_id))

    def done(self, path: str, sample_id: int) -> None:
        """A sample was read, or cannot be: what was fetched for it and not used takes no room any more."""
        self._prefetcher.drop((path, sample_id))

    def num_downloads(self, path: str) -> int:
        """How often this process has downloaded a shard."""
        return self._cache.num_downloads.get(path, 0)

    def close(self) -> None:
        """Ends the background work."""
        self._prefetcher.close()
        self._tables.close()

    def _part(self, path: str, spans: SpansRef, sample_id: int) -> bytes | None:
        offset, length = self._tables.row(spans, sample_id)
        return self._remote.read(path, offset, length) if 0 < length <= self._max_bytes else None

    def _ahead(self, path: str, spans: SpansRef, sample_id: int) -> Any:
        """A sample in the background, unless it is so long that many of them would fill the memory."""
        _, length = self._tables.row(spans, sample_id)
        return self._part(path, spans, sample_id) if length <= _MAX_AHEAD_BYTES else _LATER

    def _load(self, path: str) -> None:
        os.close(self._cache.open(path)[0])

    def _open_spans(self, path: str) -> int:
        if not is_remote(path):
            return open_regular(local_path(path))
        try:
            return self._cache.open(path)[0]
        except SourceError as error:
            if error.absent:
                raise SpansError(str(error)) from error
            raise

    def _check(self, path: str) -> None:
        reason, until = self._failed.get(path, ("", 0.0))
        if reason and time.monotonic() < until:
            raise SourceError(reason, final=True)
        self._failed.pop(path, None)

    @contextlib.contextmanager
    def _waiting(self, path: str) -> Iterator[Any]:
        began = time.monotonic()
        try:
            yield
        except RangeError as error:
            if error.whole_only:
                self._whole_only.add(host(path))
            raise
        except SourceError as error:
            self._failed[path] = str(error), time.monotonic() + _FORGIVEN_AFTER_S
            raise
        finally:
            self.waited_s += time.monotonic() - began
