"""Values and names as users write them: YAML scalars, line numbers, nearest matches.

YAML here is YAML 1.2's core schema. PyYAML's own is 1.1, where `1e-4` is text, `on` is true, `1:30` is 90 and a date is
an object; none of that is what somebody who types a flag means.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import yaml

from clap_zero.errors import ConfigError


class _CoreLoader(yaml.SafeLoader):
    """Takes scalars for what YAML 1.2's core schema says they are."""

    yaml_implicit_resolvers: ClassVar[dict] = {}


_INTEGER = re.compile(r"^[-+]?[0-9]+$|^0o[0-7]+$|^0x[0-9a-fA-F]+$")
_FLOAT = re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$")
for _tag, _pattern, _first in (
    ("null", re.compile(r"^(~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    ("bool", re.compile(r"^(true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    ("int", _INTEGER, list("-+0123456789")),
    ("float", _FLOAT, list("-+.0123456789")),
    ("merge", re.compile(r"^<<$"), ["<"]),
):
    _CoreLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _pattern, _first)


def _integer(_: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = node.value
    try:
        return int(text[2:], {"0o": 8, "0x": 16}[text[:2]]) if text[:2] in ("0o", "0x") else int(text)
    except ValueError:  # Python reads a few thousand digits at most
        raise yaml.constructor.ConstructorError(None, None, "a number of too many digits", node.start_mark) from None


_CoreLoader.add_constructor("tag:yaml.org,2002:int", _integer)


def parse_yaml(text: str) -> Any:
    """The value that a YAML 1.2 text stands for. Raises yaml.YAMLError."""
    loader = _CoreLoader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


class _CoreDumper(yaml.SafeDumper):
    """Quotes a text that either dialect would take for something else, so that every YAML reader agrees."""

    yaml_implicit_resolvers: ClassVar[dict] = {
        first: yaml.SafeDumper.yaml_implicit_resolvers.get(first, [])
        + _CoreLoader.yaml_implicit_resolvers.get(first, [])
        for first in {*yaml.SafeDumper.yaml_implicit_resolvers, *_CoreLoader.yaml_implicit_resolvers}
    }


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """PyYAML writes these breaks into single quotes, from which they come back as spaces."""
    style = '"' if any(character in text for character in "\x85\u2028\u2029") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_CoreDumper.add_representer(str, _text)


def to_yaml(value: Any) -> str:
    """YAML that `parse_yaml` and other readers take for the same value: the texts "1e-4" and "on" get quotes."""
    return yaml.dump(value, Dumper=_CoreDumper, sort_keys=False, allow_unicode=True, width=1000)


def parse_value(text: str) -> Any:
    """A flag's value: YAML where it is one, else the text itself (the glob `[ab]/*.tar`, a sentence with `: `)."""
    if text == "":
        return ""
    try:
        return parse_yaml(text)
    except yaml.YAMLError:
        return text


def parse_file(path: str, text: str) -> tuple[dict[str, Any], dict[str, int]]:
    """A YAML or JSON mapping, and the line on which each dotted key stands.

    Raises:
        ConfigError: broken text, a doubled key, or not a mapping; with file, line and column.
    """
    text = text.replace("\t", "    ") if path.endswith(".json") else text
    loader = _CoreLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return {}, {}
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(f"{path}:{node.start_mark.line + 1}: a run config is a mapping of sections to keys")
        lines: dict[str, int] = {}
        _collect_lines(path, node, "", lines)
        return loader.construct_document(node), lines
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else path
        raise ConfigError(f"{where}: not readable as YAML or JSON: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not readable as YAML or JSON: {' '.join(str(error).split())}") from None
    finally:
        loader.dispose()


def _collect_lines(path: str, node: yaml.MappingNode, prefix: str, lines: dict[str, int]) -> None:
    """Lines of all keys; those of a mapping in a list are named `data.train[0].weight`."""
    for key, value in node.value:
        name, line = f"{prefix}{key.value}", key.start_mark.line + 1
        if name in lines:
            raise ConfigError(f"{path}:{line}: {name} was already given on line {lines[name]}: keep one of them")
        lines[name] = line
        if isinstance(value, yaml.MappingNode):
            _collect_lines(path, value, f"{name}.", lines)
        elif isinstance(value, yaml.SequenceNode):
            for number, entry in enumerate(value.value):
                lines[f"{name}[{number}]"] = entry.start_mark.line + 1
                if isinstance(entry, yaml.MappingNode):
                    _collect_lines(path, entry, f"{name}[{number}].", lines)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known dotted key that somebody who wrote `name` most likely meant, or None.

    A key at the wrong level (`max_steps` for `train.max_steps`) counts before a misspelt one.
    """
    known = list(known)
    leaf = name.rsplit(".", 1)[-1]
    same_leaf = [key for key in known if key.rsplit(".", 1)[-1] == leaf]
    if same_leaf:
        return max(same_leaf, key=lambda key: difflib.SequenceMatcher(None, name, key).ratio())
    for key in difflib.get_close_matches(name, known, n=3, cutoff=0.6):
        # Of `train.a` and `train.seed` most letters are equal, too: what stands after the section has to be alike.
        if difflib.SequenceMatcher(None, leaf, key.rsplit(".", 1)[-1]).ratio() > 0.5:
            return key
    by_leaf = {key.rsplit(".", 1)[-1]: key for key in known}
    close = difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=0.7)
    return by_leaf[close[0]] if close else None


def is_holdable(number: float) -> bool:
    """Whether a counter of 64 bits can hold a number."""
    return abs(number) < 2**63


_YES_OR_NO = {"yes": "true", "on": "true", "no": "false", "off": "false"}


def way_out_of(text: str, *, is_switch: bool) -> str:
    """What to write where a JSON has a text for a number or a truth value; empty where nobody can know what was meant.

    Hjson takes a bare word for a text, up to the end of its line, commas and all.

    Args:
        text: what stands there.
        is_switch: whether a truth value is needed.
    """
    word = text.strip("-+, ").lower()
    if word in ("inf", "infinity", "nan"):
        return ": JSON has no such number, write another one, or remove the key"
    if word in ("true", "false") and text != word:
        return f": write {word}, in lower case and without quotes"
    if word == "auto":
        return ': write "auto", in lower case'
    if is_switch and word in _YES_OR_NO:
        return f": write {_YES_OR_NO[word]}"
    if word == "none":
        return ": write null, or remove the key"
    is_value = word in ("true", "false") if is_switch else _INTEGER.match(word) or _FLOAT.match(word)
    return ": write it without quotes" if is_value else ""


def shown(value: Any) -> str:
    """A value as it would be typed: null, true, 0.0001, text in quotes."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(shown, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {shown(entry)}' for key, entry in value.items())}}}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f'"{value}"' if isinstance(value, str) else str(value)
