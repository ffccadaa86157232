"""A run config as others may see it: what names the data without opening it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clap_zero.data.places import is_pipe, is_remote, shown


def public_config(run: Mapping[str, Any]) -> dict[str, Any]:
    """The same run config with data.train and data.val as they are shown: without users, queries and commands.

    For what leaves the machine or is printed, and to compare configurations: a signature that was renewed is no other
    data. (Two files that only their queries tell apart differ in the fingerprint of the data.)

    Args:
        run: a dumped run config, nested.
    """
    data = run.get("data")
    if not isinstance(data, Mapping):
        return dict(run)
    entries = {name: data[name] for name in ("train", "val") if isinstance(data.get(name), list | tuple)}
    return {**run, "data": {**data, **{name: [_entry(one) for one in value] for name, value in entries.items()}}}


def holds_secrets(run: Mapping[str, Any]) -> bool:
    """Whether a dumped run config names data with something that is not to be shown."""
    data = run.get("data")
    if not isinstance(data, Mapping):
        return False
    entries = [entry for name in ("train", "val") for entry in data.get(name) or ()]
    return any(_entry(entry) != entry for entry in entries)


def _entry(entry: Any) -> Any:
    if isinstance(entry, str):
        return _place(entry)
    if isinstance(entry, Mapping) and "shards" in entry:
        return {**entry, "shards": type(entry["shards"])(map(_place, entry["shards"]))}
    return entry


def _place(place: str) -> str:
    if not is_remote(place):
        return place
    return shown(place) if is_pipe(place) else shown(place).partition("?")[0]
