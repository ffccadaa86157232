"""Captions of a sample from its text members, under one set of rules for training, evaluation and packing."""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from clap_zero.data.members import BadSampleError

MAX_CAPTIONS = 1_000
"""Captions of a sample that evaluation takes: every one goes through the model."""


@dataclass(frozen=True)
class CaptionRule:
    """How the captions of a data set are made of its text members.

    Attributes:
        caption_key: key of the captions in a sample's json.
        caption_templates: frames around a caption, each with `{caption}`. Training draws one, evaluation takes the
            first; none: captions are used as they are.
        tags: when a caption is made of the sample's tags: "never"; "missing", where it has no usable caption; "always",
            beside its captions. Templates are not put around it.
        tag_key: key of the tags in a sample's json.
        tag_template: what is made of the tags, with `{tags}`.
    """

    caption_key: str = "text"
    caption_templates: tuple[str, ...] = ()
    tags: Literal["never", "missing", "always"] = "never"
    tag_key: str = "tag"
    tag_template: str = "The sound of {tags}"


@dataclass(frozen=True)
class Caption:
    """A caption as the model sees it, and what it says without the frame: equal captions are equal in that."""

    text: str
    bare: str


def all_captions(texts: Mapping[str, bytes], rule: CaptionRule, *, notes: list[str] | None = None) -> list[Caption]:
    """All captions of a sample, in the first template: what evaluation takes. Of very many the first MAX_CAPTIONS.

    Args:
        texts: bytes by suffix.
        rule: how captions are made.
        notes: takes a note where some are left out.

    Raises:
        BadSampleError: there is none, with the reason.
    """
    frame = rule.caption_templates[0] if rule.caption_templates else None
    candidates = _candidates(texts, rule)
    if len(candidates) > MAX_CAPTIONS and notes is not None:
        notes.append(f"has {len(candidates)} captions, evaluation takes the first {MAX_CAPTIONS}")
    return [_framed(bare, None if made_of_tags else frame) for bare, made_of_tags in candidates[:MAX_CAPTIONS]]


def draw_caption(
    texts: Mapping[str, bytes], rule: CaptionRule, generator: Callable[[], np.random.Generator]
) -> Caption:
    """One caption of a sample, in one of the templates: what training takes.

    Args:
        texts: bytes by suffix.
        rule: how captions are made.
        generator: makes the source of the draws; called only where there is a choice.

    Raises:
        BadSampleError: there is none, with the reason.
    """
    candidates, templates = _candidates(texts, rule), rule.caption_templates
    rng = generator() if len(candidates) > 1 or len(templates) > 1 else None
    bare, made_of_tags = candidates[0 if rng is None else int(rng.integers(len(candidates)))]
    if made_of_tags or not templates:
        return Caption(bare, bare)
    return _framed(bare, templates[0 if rng is None else int(rng.integers(len(templates)))])


def _framed(bare: str, template: str | None) -> Caption:
    # Not str.format: captions and templates may hold other braces.
    return Caption(bare if template is None else template.replace("{caption}", bare), bare)


def _candidates(texts: Mapping[str, bytes], rule: CaptionRule) -> list[tuple[str, bool]]:
    """(caption, whether it is made of tags) for all that a sample can be described by, at least one."""
    made_of_tags = _tag_caption(texts, rule) if rule.tags == "always" else None
    try:
        captions = [(caption, False) for caption in read_captions(texts, rule.caption_key)]
    except BadSampleError:
        if rule.tags == "missing":
            made_of_tags = _tag_caption(texts, rule)
        if made_of_tags is None:
            raise
        captions = []
    return captions if made_of_tags is None else [*captions, (made_of_tags, True)]


def _tag_caption(texts: Mapping[str, bytes], rule: CaptionRule) -> str | None:
    """The caption that is made of a sample's tags, each named once; None without any."""
    try:
        tags = usable_captions(_record(texts).get(rule.tag_key), rule.tag_key)
    except BadSampleError:
        return None
    return rule.tag_template.replace("{tags}", ", ".join(dict.fromkeys(tags)))


def read_captions(texts: Mapping[str, bytes], caption_key: str = "text") -> list[str]:
    """All usable captions of a sample, in their order.

    `.json` holds one string or a list under `caption_key`; `.txt`, one caption as a whole, is read where there is no
    json or the json lacks the key. Space around a caption is cut off; empty captions and what is no text are left out.

    Args:
        texts: bytes by suffix.
        caption_key: key in the json.

    Raises:
        BadSampleError: no usable caption, with the reason.
    """
    record = _record(texts)
    if caption_key in record:
        return usable_captions(record[caption_key], caption_key)
    if ".txt" not in texts:
        raise BadSampleError(f"json has no {caption_key!r}")
    return usable_captions(_decoded(texts[".txt"]), ".txt")


def _decoded(data: bytes) -> str:
    """The text of a .txt: UTF-8, or what its byte order mark says."""
    marked = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return data.decode("utf-16" if marked else "utf-8-sig", "replace")


def _record(texts: Mapping[str, bytes]) -> dict[str, Any]:
    """The contents of a sample's json, {} without one.

    Raises:
        BadSampleError: it cannot be read, or is no object.
    """
    if ".json" not in texts:
        return {}
    try:
        record = json.loads(texts[".json"])
    except ValueError as error:  # bad UTF-8 is a ValueError, too
        raise BadSampleError("broken json") from error
    except RecursionError as error:
        raise BadSampleError("json nested too deeply") from error
    if not isinstance(record, dict):
        raise BadSampleError("json is not an object")
    return record


def usable_captions(value: object, source: str) -> list[str]:
    """The non-empty strings in a string or a list.

    Raises:
        BadSampleError: there is none.
    """
    if not isinstance(value, str | list):
        raise BadSampleError(f"{source!r} is {'null' if value is None else type(value).__name__}, not text")
    candidates = [value] if isinstance(value, str) else value
    # A lone half of a surrogate pair, which json can hold, cannot be written as UTF-8.
    cleaned = [c.encode("utf-8", "replace").decode("utf-8").strip() for c in candidates if isinstance(c, str)]
    captions = [caption for caption in cleaned if caption]
    if not captions:
        raise BadSampleError(f"{source!r} is empty" if len(cleaned) == len(candidates) else f"{source!r} holds no text")
    return captions


def group_of(texts: Mapping[str, bytes]) -> str | None:
    """The name of the group of pairs that a sample's json puts it in under `group`, a string or a whole number.

    Pairs of one group count as having the same caption, whatever theirs are. None without a group.
    """
    if b'"group"' not in texts.get(".json", b""):
        return None
    group = _record(texts).get("group")
    if isinstance(group, bool) or not isinstance(group, str | int):
        return None
    return str(group).encode("utf-8", "replace").decode("utf-8")  # a lone surrogate cannot be hashed


def pair_id(texts: Mapping[str, bytes], caption: Caption) -> int:
    """A 63-bit number that is equal for pairs of a batch which are each other's positives.

    Args:
        texts: bytes of the sample's text members by suffix.
        caption: the caption that was drawn.
    """
    group = group_of(texts)
    return caption_id(caption.bare if group is None else f"\0group\0{group}")


def caption_id(caption: str) -> int:
    """A 63-bit number that is equal for equal captions."""
    return int.from_bytes(hashlib.blake2b(caption.encode("utf-8"), digest_size=8).digest(), "little") >> 1
