"""The data section of the run config: which data sets there are, how they are mixed, and how they are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from clap_zero.config.section import MOST, MOST_S, Auto, Section, Text, key


class DataSetSection(Section):
    """A data set of data.train or data.val, written {shards: PATTERN, weight: 2, ...}."""

    shards: tuple[Text, ...] = key(
        ..., "directory, tar or brace pattern, a local path or a URL; a list for more", "-", min_length=1
    )
    name: Text | None = key(None, "what logs call it; null: the last two parts of its first pattern", "-")
    weight: float = key(
        1.0, "how often training sees each of its pairs; 0.5: half of them", "passes an epoch", gt=0, le=1000
    )
    caption_key: Text | None = key(None, "as data.caption_key, for this set; null: data.caption_key", "-")
    caption_templates: tuple[Text, ...] = key(
        (), "sentences around a caption, each with {caption}; training draws one, evaluation takes the first", "-"
    )
    tags: Literal["never", "missing", "always"] = key(
        "never",
        "make a caption of a pair's tags: where it has no other (missing), or beside its captions (always)",
        "-",
    )
    tag_key: Text = key("tag", "member of the sample's JSON that holds its tag or list of tags", "-")
    tag_template: Text = key("The sound of {tags}", "the sentence made of tags, with {tags}", "-")

    @field_validator("shards", "caption_templates", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check(self) -> DataSetSection:
        for template in self.caption_templates:
            if "{caption}" not in template:
                raise ValueError(f"caption_templates: {template!r} has no {{caption}} where the caption goes")
        if "{tags}" not in self.tag_template:
            raise ValueError(f"tag_template: {self.tag_template!r} has no {{tags}} where the tags go")
        return self


def _kind_of_entry(value: Any) -> str:
    return "set" if isinstance(value, Mapping | DataSetSection) else "text"


DataEntry = Annotated[
    Annotated[Text, Tag("text")] | Annotated[DataSetSection, Tag("set")], Discriminator(_kind_of_entry)
]
"""A pattern, or a data set with its own weight and captions. The tags keep errors to the kind that was written."""


class DataSection(Section):
    """Where the pairs are and how they are read."""

    train: tuple[DataEntry, ...] = key(
        (),
        "training shards: directory, tar or brace pattern, local or a URL, or a data set (below); repeat for more",
        "-",
    )
    val: tuple[DataEntry, ...] = key((), "held-out shards, never trained on, written like data.train; repeat", "-")
    workers: Annotated[int, Field(ge=0, le=4096)] | Auto = key(
        "auto", "loader processes a rank; 0 reads in the rank", "count"
    )
    log_keys: Text | None = key(None, "directory for the sample keys that each rank trained on, a line a step", "-")
    truncation: Literal["auto", "rand_trunc", "fusion"] = key(
        "auto", "clips above 10 s: one crop (rand_trunc) or four views (fusion); auto: as the model does", "-"
    )
    max_caption_tokens: int = key(77, "longer captions are cut, special tokens counted", "tokens", ge=4, le=512)
    max_seconds: float = key(60.0, "longest part of a clip that is decoded", "s", ge=1, le=3600)
    shuffle_shards: int = key(16, "shards whose samples are mixed with each other", "shards", gt=0, le=MOST)
    caption_key: Text = key("text", "member of the sample's JSON that holds its caption or list of captions", "-")
    max_bad_fraction: float = key(
        0.05, "stop when more than this share of an epoch (and of a few at least) is unusable", "share", ge=0, le=1
    )
    blacklist: tuple[Text, ...] = key(
        (), "file of pairs never trained on: a key, an id or sha256:HEX a line; repeat for more", "-"
    )
    missing_shards: Literal["stop", "skip"] = key(
        "stop", "a shard that is not there, or whose source fails for good, ends the run or is passed over", "-"
    )
    cache_dir: Text | None = key(None, "where remote shards are kept; null: ~/.cache/clap_zero/shards", "-")
    cache_bytes: int = key(
        100_000_000_000, "largest size of the cache; the least used shards go first", "bytes", gt=0, le=10**18
    )
    remote_timeout_s: float = key(
        60.0, "a remote source that sends nothing for so long has stalled", "s", gt=0, le=MOST_S
    )
    remote_retries: int = key(4, "further attempts at a remote source that stalls or fails", "count", ge=0, le=100)
    allow_pipe: bool = key(False, "take shards of the form pipe:COMMAND, which run that command on this machine", "-")

    @field_validator("train", "val", "blacklist", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str | Mapping | DataSetSection) else value

    @model_validator(mode="after")
    def _check(self) -> DataSection:
        for name, entries in (("train", self.train), ("val", self.val)):
            sets = [entry for entry in entries if isinstance(entry, DataSetSection)]
            names = [entry.name for entry in sets if entry.name is not None]
            doubled = sorted({given for given in names if names.count(given) > 1})
            if doubled:
                raise ValueError(f"data.{name}: the name {doubled[0]} is given to two sets: rename one")
            if name == "val" and any(entry.weight != 1 for entry in sets):
                raise ValueError("data.val: evaluation takes every held-out pair once: remove weight there")
        return self
