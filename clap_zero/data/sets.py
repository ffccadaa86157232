"""The data sets that a setting names: which patterns belong together, what they are called, how they are captioned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from clap_zero.config.data import DataSetSection
from clap_zero.data.captions import CaptionRule
from clap_zero.data.mixture import Part
from clap_zero.data.places import is_pipe, shown


@dataclass(frozen=True)
class DataSet:
    """A data set of an index; its shards follow each other.

    Attributes:
        name: what logs call it; no two are alike.
        weight: passes over it in an epoch.
        rule: how captions are made of its samples' text members.
        first_shard: number of its first shard.
        num_shards: how many it has.
        num_stored: samples in its shards.
        num_samples: samples that an epoch takes of it.
    """

    name: str
    weight: float
    rule: CaptionRule
    first_shard: int
    num_shards: int
    num_stored: int
    num_samples: int

    @property
    def part(self) -> Part:
        """The set as the order sees it."""
        return Part(self.first_shard, self.num_shards, self.num_samples)


@dataclass(frozen=True)
class NamedSet:
    """A data set as it was asked for.

    Attributes:
        patterns: where its shards are.
        name: what logs call it.
        weight: passes over it in an epoch.
        rule: how its captions are made.
    """

    patterns: tuple[str, ...]
    name: str
    weight: float
    rule: CaptionRule


def name_sets(entries: Sequence[str | DataSetSection], caption_key: str) -> list[NamedSet]:
    """The data sets of a setting. Tars of one directory that are named one by one are one set.

    Args:
        entries: patterns and data sets.
        caption_key: key of the captions where a set has none of its own.
    """
    grouped: list[tuple[list[str], DataSetSection | None]] = []
    for entry in entries:
        if isinstance(entry, DataSetSection):
            grouped.append((list(entry.shards), entry))
        elif grouped and grouped[-1][1] is None and _same_place(grouped[-1][0][-1], entry):
            grouped[-1][0].append(entry)
        else:
            grouped.append(([entry], None))
    taken = {section.name for _, section in grouped if section is not None and section.name is not None}
    named = []
    for patterns, section in grouped:
        name = section.name if section is not None and section.name is not None else _free(_default(patterns[0]), taken)
        taken.add(name)
        weight = section.weight if section is not None else 1.0
        named.append(NamedSet(tuple(patterns), name, weight, _rule(section, caption_key)))
    return named


def _rule(section: DataSetSection | None, caption_key: str) -> CaptionRule:
    if section is None:
        return CaptionRule(caption_key=caption_key)
    return CaptionRule(
        caption_key=section.caption_key or caption_key,
        caption_templates=section.caption_templates,
        tags=section.tags,
        tag_key=section.tag_key,
        tag_template=section.tag_template,
    )


def _same_place(one: str, other: str) -> bool:
    """Whether both are tars of the same directory."""
    directories = [path.rpartition("/")[0] for path in (one, other)]
    return _is_tar(one) and _is_tar(other) and directories[0] == directories[1]


def _is_tar(pattern: str) -> bool:
    return is_pipe(pattern) or pattern.partition("?")[0].endswith(".tar")


def _default(pattern: str) -> str:
    """The last two parts of a pattern; those of the directory where it names tars."""
    plain = shown(pattern).partition("?")[0]
    if plain.endswith(".tar") and "/" in plain:
        plain = plain.rpartition("/")[0]
    parts = [part for part in plain.split("/") if part and part != "."]
    return "/".join(parts[-2:]) or plain


def _free(name: str, taken: set[str]) -> str:
    number, free = 1, name
    while free in taken:
        number += 1
        free = f"{name} ({number})"
    return free
