"""Pairs inside a shard: which members belong together, and their bytes by random access.

Key rules: a member's key is its path in the tar up to the known audio or text suffix, so `22.05.wav` has the key
`22.05` and `train.v1/0001.flac` the key `train.v1/0001`. Members are grouped over the WHOLE tar, so their order does
not matter and no pair is ever made across shards. Of equal names the first wins. `._*`, `.DS_Store` and `__MACOSX`
are ignored. Samples are numbered in the order of the tar, complete pairs first.
"""

from __future__ import annotations

import os
from collections import Counter, OrderedDict
from dataclasses import dataclass, field

from clap_zero.data.tar import Member, scan_tar

AUDIO_SUFFIXES = (
    ".flac", ".wav", ".ogg", ".oga", ".opus", ".mp3", ".m4a", ".mp4", ".aac", ".webm", ".wma", ".aif", ".aiff", ".au",
    ".caf", ".w64",
)  # fmt: skip
TEXT_SUFFIXES = (".json", ".txt")
MAX_MEMBER_BYTES = 1 << 30
_OPEN_FILES = 64


class BadSampleError(Exception):
    """A sample that cannot be used; the message is the reason, without the key."""


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


@dataclass
class _Group:
    audio: Member | None = None
    texts: dict[str, Member] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return self.audio is not None and bool(self.texts)


@dataclass
class ShardContents:
    """What a shard holds.

    Attributes:
        keys: keys of all groups of members, complete pairs first.
        groups: the members of each key.
        num_complete: number of complete pairs.
        num_ignored: number of members that are junk of an archiver.
        faults: what is wrong with the shard, in words.
        suffixes: how often each suffix occurs, known or not.
    """

    keys: list[str]
    groups: list[_Group]
    num_complete: int
    num_ignored: int
    faults: list[str]
    suffixes: Counter[str]


def split_name(name: str) -> tuple[str, str] | None:
    """(key, known suffix in lower case) of a member; the suffix is "" where it is unknown; None for junk."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if not parts or "__MACOSX" in parts or parts[-1].startswith("._") or parts[-1] == ".DS_Store":
        return None
    path, lowered = "/".join(parts), parts[-1].lower()
    for suffix in AUDIO_SUFFIXES + TEXT_SUFFIXES:
        if lowered.endswith(suffix) and len(lowered) > len(suffix):
            return path[: -len(suffix)], suffix
    return path, ""


def scan_shard(path: str) -> ShardContents:
    """Groups the members of a shard by key.

    Args:
        path: the tar.

    Raises:
        OSError: the file cannot be read.
    """
    scan = scan_tar(path)
    groups: dict[str, _Group] = {}
    suffixes: Counter[str] = Counter()
    faults, num_ignored, doubled = list(scan.faults), 0, []
    for member in scan.members:
        split = split_name(member.name)
        if split is None:
            num_ignored += 1
            continue
        key, suffix = split
        base = member.name.rsplit("/", 1)[-1]
        suffixes[base[base.find(".") :].lower() if "." in base else "(none)"] += 1
        if not suffix:
            continue
        group = groups.setdefault(key, _Group())
        if suffix in TEXT_SUFFIXES:
            doubled += [member.name] if suffix in group.texts else []
            group.texts.setdefault(suffix, member)
        elif group.audio is None:
            group.audio = member
        else:
            doubled.append(member.name)
    if doubled:
        faults.append(f"has {len(doubled)} doubled members, the first of each is used: {doubled[:3]}")
    # A stable sort: the order of the tar stays within the complete and within the incomplete ones.
    ordered = sorted(groups.items(), key=lambda item: not item[1].complete)
    return ShardContents(
        keys=[key for key, _ in ordered],
        groups=[group for _, group in ordered],
        num_complete=sum(group.complete for group in groups.values()),
        num_ignored=num_ignored,
        faults=faults,
        suffixes=suffixes,
    )


def describe_suffixes(suffixes: Counter[str]) -> str:
    """The commonest suffixes with their counts, for messages."""
    return ", ".join(f"{suffix} ({count})" for suffix, count in suffixes.most_common(8)) or "no members at all"


class ShardReader:
    """Random access to the samples of many shards from one process.

    Headers of a shard are read once while it stays among the `shards_kept` latest; at most 64 files are open.

    Args:
        shards_kept: number of shards whose contents are remembered; more than are mixed together.
    """

    def __init__(self, shards_kept: int = 64) -> None:
        self._shards_kept = shards_kept
        self._contents: OrderedDict[str, ShardContents] = OrderedDict()
        self._files: OrderedDict[str, int] = OrderedDict()
        self._notes: list[str] = []
        self._noted: set[str] = set()

    def read(self, path: str, sample_id: int, *, declared: int) -> RawSample:
        """The bytes of one sample.

        Args:
            path: the shard.
            sample_id: number of the sample within the shard.
            declared: number of samples that the index gives the shard.

        Raises:
            BadSampleError: there is no such sample, or its bytes cannot be read.
        """
        try:
            return self._read(path, sample_id, declared)
        except OSError:
            # A descriptor can go stale for good (a network file system, a disk that came back): once more, with a new
            # one, before the sample counts as lost.
            self._close(path)
        try:
            return self._read(path, sample_id, declared)
        except OSError as error:
            self._close(path)
            raise BadSampleError(f"the shard cannot be read: {error.strerror or error}") from error

    def _read(self, path: str, sample_id: int, declared: int) -> RawSample:
        contents = self._open(path, declared)
        if sample_id >= len(contents.keys):
            raise BadSampleError(f"the index says {declared} samples, the shard has {contents.num_complete}")
        group = contents.groups[sample_id]
        if group.audio is None:
            raise BadSampleError("no audio member with this key")
        if not group.texts:
            raise BadSampleError("no .json or .txt member with this key")
        audio = self._bytes(path, group.audio)
        texts = {suffix: self._bytes(path, member) for suffix, member in group.texts.items()}
        return RawSample(contents.keys[sample_id], audio, texts)

    def key(self, path: str, sample_id: int) -> str:
        """The key of a sample whose shard was read; `#number` where there is none."""
        contents = self._contents.get(path)
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

    def _close(self, path: str) -> None:
        if path in self._files:
            os.close(self._files.pop(path))

    def _open(self, path: str, declared: int) -> ShardContents:
        if path not in self._contents:
            self._contents[path] = contents = scan_shard(path)
            if path not in self._noted:
                self._noted.add(path)
                self._notes += [f"{path} {fault}" for fault in contents.faults]
                if contents.num_complete != declared:
                    self._notes.append(f"{path} has {contents.num_complete} pairs, the index says {declared}")
            while len(self._contents) > self._shards_kept:
                self._contents.popitem(last=False)
        self._contents.move_to_end(path)
        return self._contents[path]

    def _bytes(self, path: str, member: Member) -> bytes:
        if member.size_bytes > MAX_MEMBER_BYTES:
            raise BadSampleError(f"{member.size_bytes} bytes are more than the limit of {MAX_MEMBER_BYTES}")
        if path not in self._files:
            self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
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
