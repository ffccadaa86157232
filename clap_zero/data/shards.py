"""The bytes of samples by random access, wherever their shards lie.

A sample is read by its byte range where the split has spans.npy, and else through the shard's headers, which are read
once. A range that does not fit (the file is older than the shard) is noted once, and the headers are used.
"""

from __future__ import annotations

import os
from collections import Counter, OrderedDict
from dataclasses import dataclass

from clap_zero.data.members import (
    AUDIO_SUFFIXES,
    TEXT_SUFFIXES,
    BadSampleError,
    ShardContents,
    describe_suffixes,
    group_members,
    scan_shard,
    split_name,
)
from clap_zero.data.sources import ReadPolicy, local_path
from clap_zero.data.tar import Member

__all__ = [
    "AUDIO_SUFFIXES",
    "MAX_MEMBER_BYTES",
    "TEXT_SUFFIXES",
    "BadSampleError",
    "RawSample",
    "Shard",
    "ShardContents",
    "ShardReader",
    "SpansRef",
    "describe_suffixes",
    "group_members",
    "scan_shard",
    "split_name",
]
MAX_MEMBER_BYTES = 1 << 30
_OPEN_FILES = 64
_KEYS_KEPT = 1024


@dataclass(frozen=True)
class SpansRef:
    """Where the byte ranges of a shard's samples stand.

    Attributes:
        path: local path or URL of the split's spans.npy.
        first_row: row of the shard's first sample.
    """

    path: str
    first_row: int


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


@dataclass(frozen=True)
class RawSample:
    """The bytes of a pair as they stand in the shard.

    Attributes:
        key: key within the shard.
        audio: bytes of the audio file.
        texts: bytes of the text files by suffix (".json", ".txt").
    """

    key: str
    audio: bytes
    texts: dict[str, bytes]


class ShardReader:
    """Random access to the samples of many shards from one process.

    Headers of a shard are read once while it stays among the `shards_kept` latest; at most 64 files are open.

    Args:
        policy: how remote shards are read.
        shards_kept: number of shards whose contents are remembered; more than are mixed together.

    Attributes:
        seconds: time spent so far by name: "download", in which `read` waited for a remote source.
    """

    MAX_MEMBER_BYTES = MAX_MEMBER_BYTES

    def __init__(self, policy: ReadPolicy | None = None, *, shards_kept: int = 64) -> None:
        self._policy = policy or ReadPolicy()
        self._shards_kept = shards_kept
        self._contents: OrderedDict[str, ShardContents] = OrderedDict()
        self._files: OrderedDict[str, int] = OrderedDict()
        self._keys: OrderedDict[tuple[str, int], str] = OrderedDict()
        self._notes: list[str] = []
        self._noted: set[str] = set()
        self.seconds: dict[str, float] = {"download": 0.0}

    def read(self, shard: Shard, sample_id: int) -> RawSample:
        """The bytes of one sample.

        Args:
            shard: the shard.
            sample_id: number of the sample within the shard.

        Raises:
            BadSampleError: there is no such sample, or its bytes cannot be read.
            DataError: the shard is not there, and the policy is to stop then.
        """
        try:
            raw = self._read(shard, sample_id)
        except OSError:
            # A descriptor can go stale for good (a network file system, a disk that came back): once more, with a new
            # one, before the sample counts as lost.
            self._close(shard.path)
            try:
                raw = self._read(shard, sample_id)
            except OSError as error:
                self._close(shard.path)
                raise BadSampleError(f"the shard cannot be read: {error.strerror or error}") from error
        self._keys[shard.path, sample_id] = raw.key
        while len(self._keys) > _KEYS_KEPT:
            self._keys.popitem(last=False)
        return raw

    def prefetch(self, shard: Shard, sample_id: int) -> None:
        """Says that this sample will be read soon. Remote ones are fetched in the background from now on."""

    def contents(self, shard: Shard) -> ShardContents:
        """What the shard holds, from its headers.

        Raises:
            BadSampleError: it cannot be read.
            DataError: it is not there, and the policy is to stop then.
        """
        try:
            return self._open(shard)
        except OSError as error:
            raise BadSampleError(f"the shard cannot be read: {error.strerror or error}") from error

    def key(self, shard: Shard, sample_id: int) -> str:
        """The key of a sample that was read, or whose shard was; `#number` where there is none."""
        if (shard.path, sample_id) in self._keys:
            return self._keys[shard.path, sample_id]
        contents = self._contents.get(shard.path)
        known = contents is not None and sample_id < len(contents.keys)
        return contents.keys[sample_id] if contents is not None and known else f"#{sample_id}"

    def suffixes(self) -> Counter[str]:
        """Suffixes seen in the shards that are remembered."""
        total: Counter[str] = Counter()
        for contents in self._contents.values():
            total.update(contents.suffixes)
        return total

    def take_notes(self) -> list[str]:
        """What was found wrong with shards since the last call: one line a fault, each shard once."""
        notes, self._notes = self._notes, []
        return notes

    def close(self) -> None:
        """Closes all files."""
        while self._files:
            os.close(self._files.popitem()[1])

    def _read(self, shard: Shard, sample_id: int) -> RawSample:
        contents = self._open(shard)
        if sample_id >= len(contents.keys):
            raise BadSampleError(f"the index says {shard.num_samples} samples, the shard has {contents.num_complete}")
        group = contents.groups[sample_id]
        if group.audio is None:
            raise BadSampleError("no audio member with this key")
        if not group.texts:
            raise BadSampleError("no .json or .txt member with this key")
        audio = self._bytes(shard.path, group.audio)
        texts = {suffix: self._bytes(shard.path, member) for suffix, member in group.texts.items()}
        return RawSample(contents.keys[sample_id], audio, texts)

    def _close(self, path: str) -> None:
        if path in self._files:
            os.close(self._files.pop(path))

    def _open(self, shard: Shard) -> ShardContents:
        path = shard.path
        if path not in self._contents:
            self._contents[path] = contents = scan_shard(local_path(path))
            if path not in self._noted:
                self._noted.add(path)
                self._notes += [f"{path} {fault}" for fault in contents.faults]
                if contents.num_complete != shard.num_samples:
                    self._notes.append(f"{path} has {contents.num_complete} pairs, the index says {shard.num_samples}")
            while len(self._contents) > self._shards_kept:
                self._contents.popitem(last=False)
        self._contents.move_to_end(path)
        return self._contents[path]

    def _bytes(self, path: str, member: Member) -> bytes:
        if member.size_bytes > MAX_MEMBER_BYTES:
            raise BadSampleError(f"{member.size_bytes} bytes are more than the limit of {MAX_MEMBER_BYTES}")
        if path not in self._files:
            self._files[path] = os.open(local_path(path), os.O_RDONLY | os.O_CLOEXEC)
            while len(self._files) > _OPEN_FILES:
                os.close(self._files.popitem(last=False)[1])
        self._files.move_to_end(path)
        data = os.pread(self._files[path], member.size_bytes, member.offset)
        while len(data) < member.size_bytes:  # network file systems may give less than was asked for
            more = os.pread(self._files[path], member.size_bytes - len(data), member.offset + len(data))
            if not more:
                raise BadSampleError("the shard became shorter while it was read")
            data += more
        return data
