"""Labels of a clip, in a table as well as in a sidecar file."""

from __future__ import annotations

from collections.abc import Mapping

TAG_COLUMNS = ("tag", "tags")


def read_tags(row: Mapping[str, object]) -> tuple[str, ...]:
    """The labels under the first of TAG_COLUMNS that has any: one text, or a list."""
    for name in TAG_COLUMNS:
        value = row.get(name)
        if isinstance(value, str) and value.strip():
            return (value.strip(),)
        if isinstance(value, list):
            return tuple(str(tag) for tag in value)
    return ()
