"""DeepSpeed's JSON as a file: reading it, setting keys by dotted path, and refusing what DeepSpeed would ignore."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hjson

from clap_zero.config.ds_effects import leave_out_other_stages
from clap_zero.config.ds_keys import (
    ANY,
    BOOL,
    FLOAT,
    INT,
    LIST,
    OLD_NAMES,
    REMOVED,
    SECTION,
    STR,
    TEXTS,
    all_paths,
    table_at,
)
from clap_zero.config.ds_paths import assign, lookup
from clap_zero.config.values import is_holdable, nearest, shown, way_out_of
from clap_zero.errors import ConfigError

PARAMS = ("optimizer.params", "scheduler.params")
"""Sections whatever the type is; `table_at` says which types have a table of them."""

Where = Callable[[str], str]
"""Dotted path -> the place to name in an error: `file:line: `, a flag, or nothing."""


def load_ds_json(path: str, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Reads a DeepSpeed JSON (comments and trailing commas allowed, as DeepSpeed does) and applies overrides.

    Args:
        path: file.
        overrides: dotted path -> value; None removes the key.

    Returns:
        The checked dictionary, integral numbers cast to int where DeepSpeed needs one; "auto" still in it.

    Raises:
        ConfigError: unreadable or broken file, doubled, unknown or removed key, wrong kind of value; with file:line.
    """
    try:
        text = Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"--ds_config {path}: cannot be read: {reason}") from None
    if not text.strip():
        raise ConfigError(f"{path} is empty: write {{}} for a config in which everything is left to be filled")
    if path.endswith((".yaml", ".yml")) and not re.match(r"(\s|#.*\n)*\{", text):
        raise ConfigError(
            f"--ds_config {path}: a DeepSpeed config is a JSON object; a run config goes to --config {path}"
        )
    try:
        ds = hjson.loads(text, object_pairs_hook=dict)
    except hjson.HjsonDecodeError as error:
        raise ConfigError(_broken(path, text, error)) from None
    except RecursionError:
        raise ConfigError(f"{path}: broken JSON: nested too deeply") from None
    except (OverflowError, ValueError):  # 1e999, and thousands of digits
        raise ConfigError(
            f"{path}: a number in it is larger than any that fits a computer: write another one"
        ) from None
    if not isinstance(ds, dict):
        raise ConfigError(f"{path}:1: a DeepSpeed config is a JSON object, in braces")
    lines: dict[str, int] = {}
    for name, line in key_lines(text):
        if name in lines:
            raise ConfigError(f"{path}:{line}: {name} was already given on line {lines[name]}: keep one of them")
        lines[name] = line
    overrides = dict(overrides or {})
    if "zero_optimization.stage" in overrides:
        leave_out_other_stages(ds, overrides["zero_optimization.stage"])
    for name, value in overrides.items():
        _override(ds, name, value)

    def where(name: str) -> str:
        if any(name == flag or name.startswith(f"{flag}.") for flag in overrides):
            return f"--ds.{name}: "
        return f"{path}:{lines[name]}: " if name in lines else f"{path}: "

    return check_keys(ds, where=where)


def _broken(path: str, text: str, error: hjson.HjsonDecodeError) -> str:
    """Where it broke; a number that JSON has not swallows the rest of its line, and breaks far behind it."""
    if found := re.search(r'"\s*:\s*([-+]?(?:infinity|inf|nan))\b', text, re.IGNORECASE):
        line = text.count("\n", 0, found.start(1)) + 1
        return f"{path}:{line}: {found[1]} is no number in JSON: write another one, or remove the key"
    if found := re.search(r'"\s*:\s*(True|False|None)\b', text):
        line, meant = text.count("\n", 0, found.start(1)) + 1, {"None": "null"}.get(found[1], found[1].lower())
        return f"{path}:{line}: {found[1]} is Python's word, in JSON it is {meant}"
    return f"{path}:{error.lineno}:{error.colno}: broken JSON: {error.msg}"


def _override(ds: dict[str, Any], path: str, value: Any) -> None:
    """Sets (or, for None, removes) the key at a dotted path, making the sections on the way."""
    *sections, leaf = path.split(".")
    if not all([*sections, leaf]):
        raise ConfigError(f"--ds.{path}: a dotted path has no empty part")
    node = ds
    for depth, name in enumerate(sections):
        child = node.get(name)
        if child is None:
            if value is None:
                _refuse_unknown(path)
                return
            child = node[name] = {}
        if not isinstance(child, dict):
            above = ".".join(sections[: depth + 1])
            raise ConfigError(f"--ds.{path}: {above} is {shown(child)}, not a section")
        node = child
    if value is not None:
        node[leaf] = value
    elif leaf in node:
        del node[leaf]
    else:
        _refuse_unknown(path)


def _refuse_unknown(path: str) -> None:
    """Removing what is not there is fine unless the name is misspelt."""
    if path not in set(all_paths()) and path not in REMOVED and table_at(path.rpartition(".")[0], {}) is not None:
        raise ConfigError(f"--ds.{path}: {_unknown(path)}")


def _unknown(path: str) -> str:
    section, _, leaf = path.rpartition(".")
    siblings = [known for known in all_paths() if known.rpartition(".")[0] == section]
    match = nearest(path, siblings) if leaf not in {p.rpartition(".")[2] for p in all_paths()} else None
    match = match or nearest(path, all_paths())
    if match == path:  # a parameter of another optimizer or schedule
        return (
            f"unknown key {path}: {section.partition('.')[0]}.type has no such parameter: delete it, or change the type"
        )
    hint = f"did you mean {match}?" if match else "DeepSpeed 0.19.8 would ignore or refuse it"
    return f"unknown key {path}: {hint}"


def check_keys(ds: Mapping[str, Any], *, where: Where = lambda _: "") -> dict[str, Any]:
    """A copy of a DeepSpeed config in which every key is known and every value of the right kind.

    The rule for values: a number that is exactly whole becomes an int where one is needed (5e8), and 0 or 1 a truth
    value; text is never either ("1e-4", "true"); "auto" may stand anywhere and is resolved later; null means absent.

    Raises:
        ConfigError: every fault that was found, one line each.
    """
    faults: list[str] = []
    renamed = copy.deepcopy(dict(ds))
    if isinstance(renamed.get("zero_optimization"), bool):
        renamed["zero_optimization"] = {"stage": int(renamed["zero_optimization"])}  # the first form of the section
    for old, (new, stands_for) in OLD_NAMES.items():
        _rename(renamed, old, new, stands_for, where, faults)
    checked = _checked_section(renamed, "", renamed, where, faults)
    if faults:
        raise ConfigError("\n".join(faults))
    return checked


def _rename(ds: dict[str, Any], old: str, new: str, stands_for: Any, where: Where, faults: list[str]) -> None:
    """Writes a key that DeepSpeed still takes under an old name as the new one."""
    value = lookup(ds, old)
    if value is None:
        return
    section, _, leaf = old.rpartition(".")
    del (lookup(ds, section) if section else ds)[leaf]
    if lookup(ds, new) is not None:
        faults.append(
            f"{where(old)}{old} {shown(value)} and {new} {shown(lookup(ds, new))} are one setting: keep {new}"
        )
    elif stands_for is None:
        assign(ds, new, value)
    elif value is True:
        assign(ds, new, dict(stands_for))
    elif value is not False:
        faults.append(f"{where(old)}{old} is {shown(value)}, {BOOL} is needed")


def _checked_section(
    section: dict[str, Any], prefix: str, ds: Mapping[str, Any], where: Where, faults: list[str]
) -> dict[str, Any]:
    table = table_at(prefix.rstrip("."), ds)
    checked: dict[str, Any] = {}
    for name, value in section.items():
        path = f"{prefix}{name}"
        kind = table.get(name) if table is not None else ANY
        if path in REMOVED:
            faults.append(f"{where(path)}{path} is refused: {REMOVED[path]}")
        elif kind is None:
            faults.append(f"{where(path)}{_unknown(path)}")
        elif value is None:
            continue
        elif isinstance(kind, Mapping) or path in PARAMS:
            if isinstance(value, Mapping):
                checked[name] = _checked_section(dict(value), f"{path}.", ds, where, faults)
            else:
                faults.append(f"{where(path)}{path} is {shown(value)}, a section in braces is needed")
        else:
            checked[name] = value if kind is ANY else _checked_value(value, path, kind, where, faults)
    return checked


def _checked_value(value: Any, path: str, kind: str, where: Where, faults: list[str]) -> Any:
    if value == "auto" and kind is not SECTION:
        return value
    is_finite = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
    is_number = is_finite and not isinstance(value, bool) and is_holdable(value)
    fits = {
        INT: is_number and value == int(value),
        FLOAT: is_number,
        BOOL: isinstance(value, bool) or (is_number and value in (0, 1)),
        STR: isinstance(value, str),
        LIST: isinstance(value, list),
        TEXTS: isinstance(value, list) and all(isinstance(entry, str) for entry in value),
        SECTION: isinstance(value, Mapping),
    }[kind]
    if not fits:
        is_word = isinstance(value, str) and kind in (INT, FLOAT, BOOL)
        way_out = way_out_of(value, is_switch=kind is BOOL) if is_word else ""
        if is_finite and not is_holdable(value):
            way_out = ", and no counter of 64 bits holds this one"
        faults.append(f"{where(path)}{path} is {shown(value)}, {kind} is needed{way_out}")
    elif kind in (INT, BOOL):
        return int(value) if kind is INT else bool(value)
    return value


_TOKEN = re.compile(
    r"""
    (?P<space>\s+|,) | (?P<comment>\#[^\n]*|//[^\n]*|/\*.*?\*/) | (?P<open>[{\[]) | (?P<close>[}\]]) |
    (?P<colon>:) | (?P<long>'{3}.*?'{3}) | (?P<string>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*') |
    (?P<bare>[^\s,:\[\]{}"'\#/][^\s,:\[\]{}]*)|(?P<other>.)
    """,
    re.DOTALL | re.VERBOSE,
)
_PLAIN = re.compile(r"(?:true|false|null|[-+]?[0-9.][0-9.eE+-]*)\s*(?=[,}\]\n#/]|$)")


@dataclass
class _Open:
    """An object or a list whose end has not come yet, and where it stands."""

    path: str
    is_list: bool = False
    num_entries: int = 0


def key_lines(text: str) -> Iterator[tuple[str, int]]:
    """(dotted path, line) of each key of a JSON or Hjson text that is known to be well-formed; doubled ones twice.

    Those of an object in a list are named `layers[0].name`. Parsers give no positions of keys, and Hjson's hook for
    pairs does not say where they stood.
    """
    stack: list[_Open] = []
    path = ""
    position, after_colon = 0, False
    if not text.lstrip().startswith("{"):
        stack.append(_Open(""))  # Hjson allows a root without braces
    while position < len(text):
        if after_colon and (quoteless := _quoteless(text, position)):
            position, after_colon = quoteless, False
            continue
        match = _TOKEN.match(text, position)
        assert match is not None, "the last branch of the pattern takes any character"
        kind, token, start = match.lastgroup, match.group(), position
        position = match.end()
        if kind in ("space", "comment"):
            continue
        if kind == "colon":
            after_colon = True
            continue
        around = stack[-1] if stack else None
        if around is not None and around.is_list and kind != "close":
            path = f"{around.path}[{around.num_entries}]"
            around.num_entries += 1
        if kind == "open":
            stack.append(_Open(path, is_list=token == "["))
        elif kind == "close":
            stack and stack.pop()
        elif kind in ("string", "bare") and not after_colon and around is not None and not around.is_list:
            name = token.strip("\"'")
            path = f"{around.path}.{name}" if around.path else name
            yield path, text.count("\n", 0, start) + 1
        after_colon = False


def _quoteless(text: str, position: int) -> int | None:
    """End of an Hjson text without quotes, which runs to the end of its line, commas and all; None if it is not one."""
    rest = text[position:]
    blank = len(rest) - len(rest.lstrip(" \t\n\r"))
    value = rest[blank:]
    if not value or value[0] in "{[\"'#/,}]" or _PLAIN.match(value):
        return None
    end = value.find("\n")
    return position + blank + (end if end >= 0 else len(value))
