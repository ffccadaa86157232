"""Captions of a sample from its text members, under one set of rules for training, evaluation and packing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from clap_zero.data.shards import BadSampleError


@dataclass(frozen=True)
class CaptionRule:
    """How the captions of a data set are made of its text members.

    Attributes:
        caption_key: key of the captions in a sample's json.
        caption_templates: frames around a caption, each with `{caption}`. Training draws one, evaluation takes the
            first; none: captions are used as they are.
        tags: when a caption is made of the sample's tags: "never"; "missing", where it has no usable caption; "always",
            beside its captions.
        tag_key: key of the tags in a sample's json.
        tag_template: what is made of the tags, with `{tags}`.
    """

    caption_key: str = "text"
    caption_templates: tuple[str, ...] = ()
    tags: Literal["never", "missing", "always"] = "never"
    tag_key: str = "tag"
    tag_template: str = "The sound of {tags}"


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
    if ".json" in texts:
        try:
            record = json.loads(texts[".json"])
        except ValueError as error:  # bad UTF-8 is a ValueError, too
            raise BadSampleError("broken json") from error
        except RecursionError as error:
            raise BadSampleError("json nested too deeply") from error
        if not isinstance(record, dict):
            raise BadSampleError("json is not an object")
        if caption_key in record:
            return usable_captions(record[caption_key], caption_key)
        if ".txt" not in texts:
            raise BadSampleError(f"json has no {caption_key!r}")
    return usable_captions(texts[".txt"].decode("utf-8", "replace").removeprefix("\ufeff"), ".txt")


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


def caption_id(caption: str) -> int:
    """A 63-bit number that is equal for equal captions."""
    return int.from_bytes(hashlib.blake2b(caption.encode("utf-8"), digest_size=8).digest(), "little") >> 1
