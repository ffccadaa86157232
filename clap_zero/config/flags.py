"""Command line of a run: `--section.key value`, `--ds.KEY value`, and what `--help` says about them."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from clap_zero.config.data import DataSetSection
from clap_zero.config.other_trainers import called_here
from clap_zero.config.schema import RunConfig, accepts, iter_keys
from clap_zero.config.section import choices
from clap_zero.config.values import nearest, parse_value, shown
from clap_zero.errors import ConfigError

FIELDS: dict[str, FieldInfo] = dict(iter_keys())
ALIASES = {"deepspeed_config": "ds_config"}
IGNORED = "local_rank"
_MAPPING = re.compile(r"""\{\s*["']?\w+["']?\s*:(\s|["'\[{])""")

_WIDTH = 110
"""Columns of --help."""

_HEADER = """\
usage: clap-zero train --ds_config FILE [--config FILE] [--section.key VALUE ...] [--ds.KEY VALUE ...]
       deepspeed --num_gpus 8 -m clap_zero.train --ds_config FILE ...

Trains CLAP on audio-text pairs through DeepSpeed. Values are YAML (1e-4, true, null, [a, b]); a list grows by
repetition of its flag; underscores and hyphens are the same in names; --key=value and --key value, too.
Precedence: defaults below < preset's recommendation (marked *) < --config file < flags.
"""
_TOP = (
    ("--config FILE", "run config, YAML or JSON, with the sections below; default none"),
    ("--ds.KEY VALUE", "any key of the DeepSpeed JSON by its dotted path; null removes it; default none"),
    ("--local_rank N", "passed by launchers, ignored; default none"),
    ("--help", "print this and end"),
)


@dataclass
class Flags:
    """What was typed.

    Attributes:
        values: dotted key of the run config -> value.
        spelling: dotted key -> the flag as the user wrote it.
        ds: dotted path into the DeepSpeed JSON -> value; None removes the key.
        config: path of the run config file.
        wants_help: --help or -h was given.
    """

    values: dict[str, Any] = field(default_factory=dict)
    spelling: dict[str, str] = field(default_factory=dict)
    ds: dict[str, Any] = field(default_factory=dict)
    config: str | None = None
    wants_help: bool = False


def read_flags(argv: Sequence[str]) -> Flags:
    """Splits the command line; values are typed by their key but not yet checked.

    Raises:
        ConfigError: one line for each unknown flag (with what it is called here), missing value, doubled flag, stray
            argument.
    """
    flags = Flags()
    if any(token in ("--help", "-h") for token in argv):
        flags.wants_help = True
        return flags
    faults: list[str] = []
    for words in _grouped(argv):
        try:
            spelling, key, text = _flag(words)
            if key != IGNORED:
                _take(flags, spelling, key, text)
        except ConfigError as error:
            faults.append(str(error))
    if faults:
        raise ConfigError("\n".join(faults))
    return flags


def _take(flags: Flags, spelling: str, key: str, text: str) -> None:
    """Adds one flag and its value. Raises ConfigError."""
    if key in flags.spelling and not (key in FIELDS and accepts(FIELDS[key], tuple)):
        raise ConfigError(f"{spelling} is given twice: keep one")
    flags.spelling[key] = spelling
    if key == "config":
        flags.config = text
    elif key.startswith("ds."):
        flags.ds[key[3:]] = parse_value(text)
    elif accepts(FIELDS[key], tuple):
        flags.values[key] = (*flags.values.get(key, ()), *_list_value(text, spelling))
    else:
        flags.values[key] = _scalar_value(FIELDS[key], text)


def _grouped(argv: Sequence[str]) -> list[list[str]]:
    """Each flag with the words that follow it; words before the first flag are a group, too."""
    groups: list[list[str]] = []
    for token in argv:
        if token.startswith("--") or not groups:
            groups.append([])
        groups[-1].append(token)
    return groups


def _flag(words: Sequence[str]) -> tuple[str, str, str]:
    """(flag as written, canonical key, text of its value) of one group. Raises ConfigError."""
    if not words[0].startswith("--") or words[0] == "--":
        raise ConfigError(_stray(words))
    name, equals, text = words[0][2:].partition("=")
    spelling, key, rest = f"--{name}", _canonical(name), words[1:]
    if not equals:
        if key == "force" and (not rest or rest[0].lower() not in ("true", "false")):
            text = "true"
        elif not rest:
            raise ConfigError(f"{spelling} needs a value (a value that begins with -- is written {spelling}=VALUE)")
        else:
            text, rest = rest[0], rest[1:]
    if rest:
        raise ConfigError(_stray(rest, after=spelling if key in FIELDS and accepts(FIELDS[key], tuple) else ""))
    return spelling, key, text


def _stray(words: Sequence[str], *, after: str = "") -> str:
    """What is wrong with words that belong to no flag.

    Args:
        words: One at least.
        after: The flag before them if it may be repeated; mostly the shell has expanded its value.
    """
    more = f" and {len(words) - 1} more" if len(words) > 1 else ""
    told = f"unexpected argument {words[0]!r}{more}"
    name, equals, _ = words[0].lstrip("-+").partition("=")
    key = name.replace("-", "_")
    if after:
        return f"{told}: give {after} the directory, or repeat it for each"
    if equals and (key in FIELDS or key.startswith("ds.")):
        return f"{told}: write --{words[0].lstrip('-+')}"
    hint = called_here(name) if words[0].startswith("-") else None
    return f"{told}: {hint or 'every value follows its flag, as in --train.seed 1'}"


def _canonical(name: str) -> str:
    key = name.replace("-", "_")
    key = ALIASES.get(key, key)
    if key in FIELDS or key in ("config", IGNORED) or (key.startswith("ds.") and len(key) > 3):
        return key
    hint = called_here(name) if _nearest_ds(key) != f"ds.{key}" or "." not in key else None
    if hint is None:
        section = [known for known in FIELDS if known.startswith(f"{key}.")]
        if section:
            raise ConfigError(f"--{name} is a section: set one of its keys, such as --{section[0]}")
        match = nearest(key, [*FIELDS, *ALIASES, "config", IGNORED]) or _nearest_ds(key)
        hint = f"did you mean --{match}?" if match else "--help lists them all"
    raise ConfigError(f"unknown flag --{name}: {hint}")


def _nearest_ds(key: str) -> str | None:
    from clap_zero.config.ds_keys import all_paths  # only needed to word an error

    match = nearest(key, all_paths())
    return f"ds.{match}" if match else None


def _scalar_value(info: FieldInfo, text: str) -> Any:
    """Keys that hold text take it as it was typed, so that `=`, quotes, `#` and empty values survive."""
    if accepts(info, str):
        return None if text == "null" and accepts(info, type(None)) else text
    return parse_value(text)


def _list_value(text: str, spelling: str) -> tuple[Any, ...]:
    """The entries that one flag adds: a YAML list, a mapping with at least one `key: value`, or the text itself.

    `{a,b}` and `[ab]/*` are patterns, although YAML could read them, too.

    Raises:
        ConfigError: a mapping that YAML cannot read; mostly a pattern with braces inside it lacks its quotes.
    """
    if text.startswith("["):
        value = parse_value(text)
        return tuple(value) if isinstance(value, list) else (text,)
    if _MAPPING.match(text):
        value = parse_value(text)
        if not isinstance(value, dict):
            raise ConfigError(
                f"{spelling}: not readable as a YAML mapping: put quotes around a pattern with braces, as in "
                """{shards: "s3://b/{000..127}.tar", weight: 2}"""
            )
        return (value,)
    return (text,)


def help_text() -> str:
    """Every flag with what it does, its unit and its default, grouped by section."""
    lines = [_HEADER]
    recommended = _recommended_keys()
    groups: dict[str, list[str]] = {"": []}
    for key, info in FIELDS.items():
        section = key.partition(".")[0] if "." in key else ""
        mark = "*" if key in recommended else ""
        groups.setdefault(section, []).append(_entry(f"--{key} {_choices(info)}", f"{_described(info)}{mark}"))
    groups["data"] += _set_help()
    lines += [_entry(name, text) for name, text in _TOP] + groups.pop("")
    for section, entries in groups.items():
        doc = (RunConfig.model_fields[section].annotation.__doc__ or "").strip().partition("\n")[0]
        lines += [f"\n{section}: {doc}", *entries]
    return "\n".join(lines) + "\n"


def _set_help() -> list[str]:
    """The keys of a data set, which is a value of --data.train and --data.val and has no flags of its own."""
    doc = (DataSetSection.__doc__ or "").partition("\n")[0]
    keys = [_entry(f"{name}: {_choices(info)}", _described(info), indent=6) for name, info in iter_keys(DataSetSection)]
    return [f"  {doc} Its keys:", *keys]


def _entry(name: str, text: str, *, indent: int = 2) -> str:
    """A name, and below it what it is, in lines that a terminal can show."""
    margin = " " * (indent + 4)
    wrapped = textwrap.wrap(text, _WIDTH, initial_indent=margin, subsequent_indent=margin, break_on_hyphens=False)
    return "\n".join([" " * indent + name, *wrapped])


def _described(info: FieldInfo) -> str:
    extra = info.json_schema_extra
    unit = extra.get("unit", "-") if isinstance(extra, dict) else "-"
    default = "required" if info.default is PydanticUndefined else f"default {_shown_default(info.default)}"
    return f"{info.description}; {'' if unit == '-' else f'unit {unit}, '}{default}"


def _recommended_keys() -> set[str]:
    from clap_zero.config.preset import load_preset  # reads a file: only for --help

    return set(load_preset("htsat-fused").run) | set(load_preset("tiny").run)


def _shown_default(value: Any) -> str:
    if value == ():
        return "none"
    return value if isinstance(value, str) else shown(value)


def _choices(info: FieldInfo) -> str:
    """What stands after the flag in the help: its fixed choices, then the kinds of value that it takes."""
    if accepts(info, bool):
        return "[true|false]"
    kinds = (("N", int), ("X", float), ("TEXT", str), ("TEXT", tuple))
    return "|".join(choices(info) + [name for name, kind in kinds if accepts(info, kind)])
