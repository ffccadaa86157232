"""Command line and file -> one checked RunConfig, with every value's origin known while it is checked."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import ValidationError

from clap_zero.config.data import DataSetSection
from clap_zero.config.ds_keys import KEYS
from clap_zero.config.flags import FIELDS, help_text, read_flags
from clap_zero.config.other_trainers import called_here
from clap_zero.config.preset import load_preset
from clap_zero.config.schema import PRESETS, RunConfig, accepts
from clap_zero.config.values import nearest, parse_file, shown, to_yaml
from clap_zero.errors import ConfigError

LENGTHS = ("train.max_steps", "train.epochs")
NOT_RECORDED = ("resume", "force")
"""Keys that say how this start behaves, not what the run is: left out of config.yaml and of comparisons."""


@dataclass(frozen=True)
class CommandLine:
    """A parsed command line.

    Attributes:
        run: the run config, complete; run_dir is always set.
        ds_path: path of the DeepSpeed JSON.
        ds_overrides: dotted path into the JSON -> value; None removes the key.
        explicit: dotted keys of the run config that the user gave in the file or as flags.
        notes: what was chosen because the user did not say, one line each, to be printed.
    """

    run: RunConfig
    ds_path: str
    ds_overrides: dict[str, Any]
    explicit: frozenset[str]
    notes: tuple[str, ...] = ()


def parse_command_line(argv: Sequence[str], *, has_gpu: bool = False) -> CommandLine:
    """Flags, the file that they name, and the preset's recommendations -> CommandLine.

    Args:
        argv: arguments after the program's name.
        has_gpu: whether an accelerator is there; decides the preset when nobody named a model.

    Raises:
        ConfigError: one line for each thing that is wrong, with its flag or file:line.
        SystemExit: 0 after --help was printed.
    """
    flags = read_flags(argv)
    if flags.wants_help:
        print(help_text(), end="")
        raise SystemExit(0)
    values, origin = _read_file(flags.config) if flags.config is not None else ({}, {})
    values.update(flags.values)
    for key in flags.values:
        origin = {name: where for name, where in origin.items() if not name.startswith((f"{key}[", f"{key}."))}
        origin[key] = flags.spelling[key]
    explicit = frozenset(values)
    notes = _fill_from_preset(values, has_gpu=has_gpu)
    if values.get("run_dir") is None:
        values["run_dir"] = _default_run_dir(values)
    run = _build(values, origin)
    return CommandLine(run, run.ds_config, flags.ds, explicit, tuple(notes))


def run_config_from_file(path: str) -> RunConfig:
    """The run config that a file such as a run directory's config.yaml describes. Raises ConfigError."""
    values, origin = _read_file(path)
    _fill_from_preset(values, has_gpu=False)
    return _build(values, origin)


def dump_run_config(run: RunConfig) -> str:
    """YAML that, given as --config, starts the same run. Keys that only say how to start are left out."""
    content = run.model_dump(mode="json", exclude=set(NOT_RECORDED))
    return to_yaml(content)


def diff_configs(
    old: Mapping[str, Any], new: Mapping[str, Any], *, ignore: Collection[str] = NOT_RECORDED
) -> list[str]:
    """Lines `key: old -> new` for the leaves in which two nested configs differ, sorted by key.

    Args:
        ignore: dotted keys, or prefixes of them, that may differ.
    """
    before, after = _flatten(old), _flatten(new)
    lines = []
    for key in sorted(set(before) | set(after)):
        if any(key == name or key.startswith(f"{name}.") for name in ignore):
            continue
        left, right = before.get(key, _ABSENT), after.get(key, _ABSENT)
        if left != right:
            lines.append(f"{key}: {_side(left)} -> {_side(right)}")
    return lines


_ABSENT = object()
_UNION_TAGS = ("set", "text")


def _side(value: Any) -> str:
    return "absent" if value is _ABSENT else shown(value)


def _flatten(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in content.items():
        if isinstance(value, Mapping) and value:
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = list(value) if isinstance(value, tuple) else value
    return flat


def _read_file(path: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Dotted values of a run config file, and `file:line` of each."""
    try:
        text = Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"--config {path}: cannot be read: {reason}") from None
    content, lines = parse_file(path, text)
    if len(KEYS.keys() & content.keys()) > 1 and not RunConfig.model_fields.keys() & content.keys():
        raise ConfigError(f"--config {path}: these are the keys of a DeepSpeed JSON, which goes to --ds_config {path}")
    values: dict[str, Any] = {}
    faults = []
    for key, value in content.items():
        section = [known for known in FIELDS if known.startswith(f"{key}.")]
        if section and not isinstance(value, (dict, type(None))):
            faults.append(f"{path}:{lines[key]}: {key} is a section: give its keys below it, such as {section[0]}")
            continue
        entries = {f"{key}.{name}": entry for name, entry in (value or {}).items()} if section else {str(key): value}
        for name, entry in entries.items():
            if name not in FIELDS:
                faults.append(f"{path}:{lines.get(name, 1)}: unknown key {name}: {_hint(name)}")
            elif name in values:
                faults.append(f"{path}:{lines.get(name, 1)}: {name} is given twice: keep one of them")
            else:
                values[name] = tuple(entry) if isinstance(entry, list) else entry
    if faults:
        raise ConfigError("\n".join(faults))
    return values, {name: f"{path}:{line}" for name, line in lines.items()}


def _hint(name: str) -> str:
    """What an unknown key of a file may be; keys that a file can hold are spelt as in files."""
    hint = called_here(name)
    if hint is not None:
        return re.sub(r"--([\w.]*\w)", lambda flag: flag[1] if flag[1] in FIELDS else flag[0], hint)
    match = nearest(name, FIELDS)
    return f"did you mean {match}?" if match else "--help lists all keys"


def _fill_from_preset(values: dict[str, Any], *, has_gpu: bool) -> list[str]:
    """Adds what neither file nor flags gave: the model, and the preset's recommended values."""
    notes = []
    if values.get("model.preset") is None and values.get("model.pretrained") is None:
        values["model.preset"] = "htsat-fused" if has_gpu else "tiny"
        there = "an accelerator is there" if has_gpu else "there is no accelerator"
        notes.append(f"model.preset {values['model.preset']}: neither preset nor pretrained was named, and {there}")
    name = values.get("model.preset")
    if name is not None and name not in PRESETS:
        return notes
    has_length = any(values.get(key) is not None for key in LENGTHS)
    for key, value in load_preset(name).run.items():
        if key not in values and not (has_length and key in LENGTHS):
            values[key] = value
    return notes


def _default_run_dir(values: Mapping[str, Any]) -> str:
    """No timestamp, so that the same command finds its run again."""
    model = values.get("model.preset") or PurePosixPath(str(values.get("model.pretrained"))).name or "model"
    return f"runs/{model}-{PurePosixPath(str(values.get('ds_config'))).stem}"


def _build(values: Mapping[str, Any], origin: Mapping[str, str]) -> RunConfig:
    nested: dict[str, Any] = {}
    for key, value in values.items():
        section, _, leaf = key.rpartition(".")
        (nested.setdefault(section, {}) if section else nested)[leaf] = value
    try:
        return RunConfig(**nested)
    except ValidationError as error:
        raise ConfigError("\n".join(_readable(error, origin))) from None


def _readable(error: ValidationError, origin: Mapping[str, str]) -> list[str]:
    """One line for each key that is wrong."""
    reasons: dict[str, list[str]] = {}
    given: dict[str, Any] = {}
    for entry in error.errors():
        key, name = _named(entry["loc"])
        reasons.setdefault(name, []).append(_reason(entry, within=key))
        given[name] = entry["input"]
    lines = []
    for name, texts in reasons.items():
        what = " or ".join(dict.fromkeys(texts))
        key = name.partition("[")[0]
        if name == "ds_config" and name not in origin:
            lines.append("no DeepSpeed JSON is named: give --ds_config FILE, such as --ds_config ds_configs/zero2.json")
        elif key in FIELDS:
            alone = name.replace("[0]", "")  # a single set may be given without a list around it
            where = next((origin[place] for place in (name, alone, key) if place in origin), key)
            value = "" if _may_hold_secrets(given[name]) else f" {shown(given[name])}"
            lines.append(f"{where}: {name}{value} is refused: {what}")
        else:
            lines.append(what)
    return lines


def _may_hold_secrets(value: Any) -> bool:
    """Whether a refused value is, or holds, a URL or a command, which may come with a password."""
    if isinstance(value, Mapping):
        return any(map(_may_hold_secrets, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_may_hold_secrets, value))
    return isinstance(value, str) and ("://" in value or value.startswith("pipe:"))


def _named(location: Sequence[int | str]) -> tuple[str, str]:
    """The dotted key that a place in the config belongs to, and the place as a file would spell it.

    (data, train, 0, set, weight) is data.train and `data.train[0].weight`; `set` is the tag of a union.
    """
    path = [str(part) for part in location]
    length = next((n for n in (2, 1) if ".".join(path[:n]) in FIELDS), len(path))
    key = name = ".".join(path[:length])
    rest = location[length:]
    if key not in FIELDS or not accepts(FIELDS[key], tuple):
        return key, key
    for part in rest:
        name += f"[{part}]" if isinstance(part, int) else "" if part in _UNION_TAGS else f".{part}"
    return key, name


def _reason(entry: Mapping[str, Any], *, within: str) -> str:
    kind, context = entry["type"], entry.get("ctx", {})
    if kind == "extra_forbidden" and within in FIELDS:
        match = nearest(str(entry["loc"][-1]), DataSetSection.model_fields)
        return f"there is no such key: did you mean {match}?" if match else "there is no such key: --help lists all"
    if kind == "missing" and within in FIELDS:
        return "it is needed: the place of the set's shards"
    if kind == "value_error":
        return str(context["error"])
    if kind == "literal_error":
        return f"{context['expected']} is possible"
    if kind == "string_type":
        return "a text is needed (put quotes around it in a file)"
    if kind in ("int_type", "int_parsing", "int_from_float"):
        return "a whole number is needed"
    if kind in ("float_type", "float_parsing", "finite_number"):
        return "a finite number is needed"
    if kind == "string_too_short":
        return "it must not be empty"
    message = str(entry["msg"]).removeprefix("Input ")
    return f"it {message[0].lower()}{message[1:]}"
