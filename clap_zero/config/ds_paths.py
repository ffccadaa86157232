"""Reading and writing a nested config by dotted path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def lookup(ds: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path, None where there is none."""
    node: Any = ds
    for name in path.split("."):
        node = node.get(name) if isinstance(node, Mapping) else None
    return node


def assign(ds: dict[str, Any], path: str, value: Any) -> None:
    """Sets the value at a dotted path, making the sections on the way."""
    *sections, leaf = path.split(".")
    for name in sections:
        ds = ds.setdefault(name, {})
    ds[leaf] = value
