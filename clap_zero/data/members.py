"""Pairs inside a shard: which members belong together.

Key rules: a member's key is its path in the tar up to the known audio or text suffix, so `22.05.wav` has the key
`22.05` and `train.v1/0001.flac` the key `train.v1/0001`. Members are grouped over the WHOLE tar, so their order does
not matter and no pair is ever made across shards. `._*`, `.DS_Store` and `__MACOSX` are ignored. Samples are numbered
in the order of the tar, complete pairs first.

Of members with equal names copies are ignored. Where their contents differ (a writer that was killed and went on in the
same file) nobody can say which sound belongs to which caption: the key is refused. A second sound in another format is
ignored where it stands beside the first one, and else refused alike.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from clap_zero.data.preads import pread_all
from clap_zero.data.regular import open_regular
from clap_zero.data.tar import Member, TarScan, scan_descriptor

AUDIO_SUFFIXES = (
    ".flac", ".wav", ".ogg", ".oga", ".opus", ".mp3", ".m4a", ".mp4", ".aac", ".webm", ".wma", ".aif", ".aiff", ".au",
    ".caf", ".w64", ".logmel",
)  # fmt: skip
TEXT_SUFFIXES = (".json", ".txt")
_COMPARED_BYTES = 1 << 20


class BadSampleError(Exception):
    """A sample that cannot be used; the message is the reason, without the key."""


@dataclass
class Group:
    """The members of a key, and why they cannot be used, if so."""

    audio: Member | None = None
    texts: dict[str, Member] = field(default_factory=dict)
    fault: str = ""

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
    groups: list[Group]
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
    with os.fdopen(open_regular(path), "rb") as file:
        return group_open(file.fileno())


def group_open(descriptor: int) -> ShardContents:
    """As scan_shard, of an open file."""
    return group_members(scan_descriptor(descriptor), same=partial(_same_bytes, descriptor))


def group_members(scan: TarScan, *, same: Callable[[Member, Member], bool] | None = None) -> ShardContents:
    """Groups members by key: audio and texts of the same key belong together wherever they stand in the tar.

    Args:
        scan: the members.
        same: whether two members have equal contents; None: nobody can look, so they count as different.
    """
    groups: dict[str, Group] = {}
    suffixes: Counter[str] = Counter()
    faults, num_ignored, doubled, previous = list(scan.faults), 0, [], ""
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
        group = groups.setdefault(key, Group())
        first = group.texts.get(suffix) if suffix in TEXT_SUFFIXES else group.audio
        if first is not None:
            doubled.append(member.name)
            # Another format of the same sound; `k.json` and `./k.json` are one name.
            beside = previous == key and split_name(first.name) != split
            if not (beside or group.fault or (same is not None and same(first, member))):
                group.fault = f"stands in the tar more than once with other contents: {base!r}"
        elif suffix in TEXT_SUFFIXES:
            group.texts[suffix] = member
        else:
            group.audio = member
        previous = key
    if doubled:
        faults.append(f"has {len(doubled)} doubled members; copies are ignored, other contents refused: {doubled[:3]}")
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


def _same_bytes(descriptor: int, first: Member, second: Member) -> bool:
    """Whether two members of an open tar are copies. Each is as long as what it takes in the file: no claims count."""
    if first.size_bytes != second.size_bytes:
        return False
    for start in range(0, first.size_bytes, _COMPARED_BYTES):
        length = min(_COMPARED_BYTES, first.size_bytes - start)
        one, other = (pread_all(descriptor, length, member.offset + start) for member in (first, second))
        if one != other:
            return False
    return True


def describe_suffixes(suffixes: Counter[str]) -> str:
    """The commonest suffixes with their counts, for messages."""
    return ", ".join(f"{suffix} ({count})" for suffix, count in suffixes.most_common(8)) or "no members at all"
