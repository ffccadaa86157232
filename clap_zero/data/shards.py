"""The bytes of samples by random access, wherever their shards lie.

A sample is read by its byte range where the split has spans.npy, and else through the shard's headers, which are read
once. A range that does not fit (the file is older than the shard) is noted once, and the headers are used.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clap_zero.data.members import BadSampleError, ShardContents, group_open
from clap_zero.data.places import ReadPolicy, host, is_remote, local_path, shown
from clap_zero.data.preads import pread_all
from clap_zero.data.regular import open_regular
from clap_zero.data.samples import MAX_MEMBER_BYTES, RawSample, read_group, sample_in
from clap_zero.data.source_errors import RangeError, SourceError
from clap_zero.data.spans import SpansError, SpansRef, SpanTables
from clap_zero.errors import DataError

if TYPE_CHECKING:
    from clap_zero.data.fetch import RemoteShards

_OPEN_FILES = 64
_KEYS_KEPT = 1024
_MEMBERS_KEPT = 1_000_000
_THRASHING = 2


@dataclass(frozen=True)
class Shard:
    """A tar of pairs.

    Attributes:
        path: absolute path or URL.
        key_prefix: path relative to its data root; the first part of its samples' keys.
        num_samples: count of record.
        set_id: number of its data set.
        spans: byte ranges of its samples, where they are known.
    """

    path: str
    key_prefix: str
    num_samples: int
    set_id: int = 0
    spans: SpansRef | None = None


class ShardReader:
    """Random access to the samples of many shards from one process.

    Headers of a shard are read once while it stays among the `shards_kept` latest; at most 64 files are open. Nothing
    is opened and no thread started before the first read or hint, so a reader may be sent to another process until
    then.

    Args:
        policy: how remote shards are read.
        shards_kept: number of shards whose contents are remembered; more than are mixed together.

    Attributes:
        seconds: time spent so far by name: "download", in which `read` waited for remote sources.
    """

    def __init__(self, policy: ReadPolicy | None = None, *, shards_kept: int = 64) -> None:
        self._policy = policy or ReadPolicy()
        self._shards_kept = shards_kept
        self._contents: OrderedDict[str, tuple[str, ShardContents]] = OrderedDict()
        self._num_members = 0
        self._files: OrderedDict[str, int] = OrderedDict()
        self._keys: OrderedDict[tuple[str, int], str] = OrderedDict()
        self._notes: list[str] = []
        self._noted: set[str] = set()
        self._again: Counter[str] = Counter()
        self._without_spans: set[str] = set()
        self._tables: SpanTables | None = None
        self._remote: RemoteShards | None = None

    @property
    def seconds(self) -> dict[str, float]:
        """Time spent so far by name: "download", in which `read` waited for remote sources."""
        return {"download": self._remote.waited_s if self._remote is not None else 0.0}

    def read(self, shard: Shard, sample_id: int) -> RawSample:
        """The bytes of one sample.

        Args:
            shard: the shard.
            sample_id: number of the sample within the shard.

        Raises:
            BadSampleError: there is no such sample, or its bytes cannot be read.
            DataError: the shard cannot be had, and the policy is to stop then; or the cache has no room for it.
        """
        try:
            with self._named(shard):
                raw = self._read_again(shard, sample_id)
        finally:
            if self._remote is not None:
                self._remote.done(shard.path, sample_id)
        self._keys[shard.path, sample_id] = raw.key
        while len(self._keys) > _KEYS_KEPT:
            self._keys.popitem(last=False)
        return raw

    def prefetch(self, shard: Shard, sample_id: int) -> None:
        """Says that this sample will be read soon: a remote one is fetched in the background from now on."""
        if is_remote(shard.path) and shard.path not in self._contents:
            spans = None if shard.path in self._without_spans else shard.spans
            self._far().hint(shard.path, spans, sample_id)

    def contents(self, shard: Shard) -> ShardContents:
        """What the shard holds, from its headers.

        Raises:
            BadSampleError: it cannot be read.
            DataError: it cannot be had, and the policy is to stop then.
        """
        with self._named(shard), self._opened(shard.path) as (descriptor, version):
            return self._scanned(shard, descriptor, version)

    def key(self, shard: Shard, sample_id: int) -> str:
        """The key of a sample that was read, or whose shard was; `#number` where there is none."""
        if (shard.path, sample_id) in self._keys:
            return self._keys[shard.path, sample_id]
        keys = self._contents[shard.path][1].keys if shard.path in self._contents else []
        return keys[sample_id] if sample_id < len(keys) else f"#{sample_id}"

    def suffixes(self) -> Counter[str]:
        """Suffixes seen in the shards that are remembered."""
        total: Counter[str] = Counter()
        for _, contents in self._contents.values():
            total.update(contents.suffixes)
        return total

    def take_notes(self) -> list[str]:
        """What was found wrong with shards since the last call: one line a fault, each shard once."""
        notes, self._notes = self._notes, []
        return notes

    def close(self) -> None:
        """Closes all files and ends the background work. The reader may be used again."""
        while self._files:
            os.close(self._files.popitem()[1])
        for part in (self._tables, self._remote):
            if part is not None:
                part.close()
        self._tables = self._remote = None

    def _read_again(self, shard: Shard, sample_id: int) -> RawSample:
        try:
            return self._read(shard, sample_id)
        except OSError:
            # A descriptor can go stale for good (a network file system, a disk that came back): once more, with a
            # new one, before the sample counts as lost.
            self._close(shard.path)
            return self._read(shard, sample_id)

    def _read(self, shard: Shard, sample_id: int) -> RawSample:
        raw = self._read_span(shard, sample_id)
        if raw is not None:
            return raw
        with self._opened(shard.path) as (descriptor, version):
            contents = self._scanned(shard, descriptor, version)
            if sample_id >= len(contents.keys):
                raise BadSampleError(
                    f"the index says {shard.num_samples} samples, the shard has {contents.num_complete}"
                )
            raw = read_group(descriptor, contents.keys[sample_id], contents.groups[sample_id])
            if not is_remote(shard.path) and _version(descriptor) != version:
                raise OSError(errno.ESTALE, "it was written anew meanwhile")  # read again, once
            return raw

    def _read_span(self, shard: Shard, sample_id: int) -> RawSample | None:
        """The sample by its byte range; None where the headers of the shard have to be read."""
        if shard.spans is None or shard.path in self._without_spans:
            return None
        try:
            data = self._span_bytes(shard, shard.spans, sample_id)
            return None if data is None else sample_in(data)
        except (SpansError, RangeError) as error:
            self._without_spans.add(shard.path)
            if isinstance(error, RangeError) and error.whole_only:
                server = host(shard.path)
                self._note(f"{server} gives whole files only, no parts of them: shards are downloaded whole", server)
                return None
            where = shown(shard.spans.path)
            self._note(f"{where} cannot be used for {shown(shard.path)}, which is read without it: {error}", where)
            return None

    def _span_bytes(self, shard: Shard, spans: SpansRef, sample_id: int) -> bytes | None:
        if is_remote(shard.path):
            return self._far().part(shard.path, spans, sample_id)
        if self._tables is None:
            self._tables = SpanTables(lambda path: open_regular(local_path(path)))
        offset, length = self._tables.row(spans, sample_id)
        if not 0 < length <= MAX_MEMBER_BYTES:
            return None
        with self._opened(shard.path) as (descriptor, _):
            data = pread_all(descriptor, length, offset) if offset < 1 << 62 else b""
            if len(data) < length:
                raise SpansError("the shard is shorter than it says")
            return data

    def _scanned(self, shard: Shard, descriptor: int, version: str) -> ShardContents:
        """The contents of an open shard, remembered as long as it is the same version."""
        path = shard.path
        if path in self._contents and self._contents[path][0] != version:
            self._num_members -= len(self._contents.pop(path)[1].keys)
            for name in [name for name in self._keys if name[0] == path]:
                del self._keys[name]
        if path not in self._contents:
            contents = group_open(descriptor)
            self._contents[path] = version, contents
            self._num_members += len(contents.keys)
            faults = list(contents.faults)
            if contents.num_complete != shard.num_samples:
                faults.append(f"has {contents.num_complete} pairs, the index says {shard.num_samples}")
            for fault in faults:
                self._note(f"{shown(path)}: {fault}")
            while len(self._contents) > self._shards_kept or (
                self._num_members > _MEMBERS_KEPT and len(self._contents) > 1
            ):
                self._num_members -= len(self._contents.popitem(last=False)[1][1].keys)
        self._contents.move_to_end(path)
        return self._contents[path][1]

    @contextlib.contextmanager
    def _opened(self, path: str) -> Iterator[tuple[int, str]]:
        """(descriptor, version) of a shard. Local files stay open for a while; cached ones do not: they would keep the
        disk full when the cache drops them."""
        if is_remote(path):
            far, known = self._far(), path in self._contents
            before = far.num_downloads(path)
            descriptor, version = far.open(path)
            # Dropped by the cache while it is among those that are mixed: once may happen, not again and again.
            self._again[path] = (self._again[path] if known else 0) + (known and far.num_downloads(path) > before)
            if self._again[path] >= _THRASHING:
                self._note(
                    "shards are downloaded again and again: the cache does not hold those that are mixed together; "
                    "raise data.cache_bytes, lower data.shuffle_shards, or write spans.npy (clap-zero check)"
                )
            try:
                yield descriptor, version
            finally:
                os.close(descriptor)
            return
        if path not in self._files:
            self._files[path] = open_regular(local_path(path))
            while len(self._files) > _OPEN_FILES:
                os.close(self._files.popitem(last=False)[1])
        self._files.move_to_end(path)
        # Looked at each time: a file that is written anew while it is open would be read at places of the old one.
        yield self._files[path], _version(self._files[path])

    @contextlib.contextmanager
    def _named(self, shard: Shard) -> Iterator[None]:
        """Makes of what went wrong with a shard what the policy says, and names the shard once."""
        try:
            yield
        except SourceError as error:
            if self._policy.missing == "stop":
                raise DataError(
                    f"{shown(shard.path)}: {error}; --data.missing_shards skip passes over what cannot be had"
                ) from error
            self._note(f"{shown(shard.path)} cannot be had, its samples are passed over: {error}", shard.path)
            raise BadSampleError(f"the shard cannot be had: {error}") from error
        except OSError as error:
            self._close(shard.path)
            raise BadSampleError(f"the shard cannot be read: {error.strerror or error}") from error

    def _note(self, note: str, name: str | None = None) -> None:
        """Notes something, once for each `name`."""
        if (name or note) not in self._noted:
            self._noted.add(name or note)
            self._notes.append(note)

    def _close(self, path: str) -> None:
        if path in self._files:
            os.close(self._files.pop(path))

    def _far(self) -> RemoteShards:
        if self._remote is None:
            from clap_zero.data.fetch import RemoteShards  # fsspec is loaded only where something remote is read

            self._remote = RemoteShards(self._policy, max_bytes=MAX_MEMBER_BYTES)
        return self._remote


def _version(descriptor: int) -> str:
    """Differs when another file stands under the same name, or the same one was written again."""
    found = os.fstat(descriptor)
    return f"{found.st_dev} {found.st_ino} {found.st_size} {found.st_mtime_ns}"
