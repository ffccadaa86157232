"""The bytes of one sample, out of a shard or out of its byte range."""

from __future__ import annotations

from dataclasses import dataclass

from clap_zero.data.members import BadSampleError, Group, group_members
from clap_zero.data.preads import pread_all
from clap_zero.data.spans import SpansError
from clap_zero.data.tar import scan_bytes

MAX_MEMBER_BYTES = 1 << 30
MAX_TEXT_BYTES = 1 << 24


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


def sample_in(data: bytes) -> RawSample:
    """The sample in a range.

    Raises:
        SpansError: the range does not hold exactly one complete pair: it belongs to another version of the shard.
    """
    scan = scan_bytes(data)
    contents = group_members(scan)
    usable = not scan.faults and len(contents.keys) == contents.num_complete == 1 and not contents.groups[0].fault
    if not usable or scan.members[0].header_offset != 0:
        raise SpansError("there is no sample at the place that it names: is it older than the shard?")
    group = contents.groups[0]
    _check_size(group)
    assert group.audio is not None
    members = {suffix: data[m.offset : m.offset + m.size_bytes] for suffix, m in group.texts.items()}
    audio = data[group.audio.offset : group.audio.offset + group.audio.size_bytes]
    return RawSample(contents.keys[0], audio, members)


def read_group(descriptor: int, key: str, group: Group) -> RawSample:
    """The sample of a key, out of an open shard.

    Raises:
        BadSampleError: it is not complete, or too large, or the shard became shorter.
        OSError: it cannot be read.
    """
    if group.audio is None:
        raise BadSampleError("no audio member with this key")
    if not group.texts:
        raise BadSampleError("no .json or .txt member with this key")
    if group.fault:
        raise BadSampleError(group.fault)
    _check_size(group)
    audio = _bytes(descriptor, group.audio.offset, group.audio.size_bytes)
    texts = {suffix: _bytes(descriptor, m.offset, m.size_bytes) for suffix, m in group.texts.items()}
    return RawSample(key, audio, texts)


def _check_size(group: Group) -> None:
    """Raises BadSampleError where a member is too large to be read."""
    assert group.audio is not None
    for member, limit in ((group.audio, MAX_MEMBER_BYTES), *((m, MAX_TEXT_BYTES) for m in group.texts.values())):
        if member.size_bytes > limit:
            raise BadSampleError(f"{member.size_bytes} bytes are more than the limit of {limit}")


def _bytes(descriptor: int, offset: int, size_bytes: int) -> bytes:
    data = pread_all(descriptor, size_bytes, offset)
    if len(data) < size_bytes:
        raise BadSampleError("the shard became shorter while it was read")
    return data
