"""Items from a table (CSV, TSV, JSONL): which columns hold what, and what is wrong with a row."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from clap_zero.data.captions import usable_captions
from clap_zero.data.members import AUDIO_SUFFIXES, BadSampleError, split_name
from clap_zero.data.pack_files import plain, readable
from clap_zero.data.pack_items import Item, Source, listed
from clap_zero.data.pack_tables import read_table
from clap_zero.data.pack_tags import TAG_COLUMNS, read_tags
from clap_zero.errors import DataError

AUDIO_COLUMNS = ("audio", "file", "file_name", "filename", "path", "audio_path", "audio_filepath", "wav")
CAPTION_COLUMNS = re.compile(r"(captions?|text|sentence|description)([ _]?\d+)?", re.IGNORECASE)
SPLIT_NAME = re.compile(r"(?!part\.json$)[A-Za-z0-9_][A-Za-z0-9_.-]*")
"""Not that of the record of a part, beside which splits lie."""
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_NOTHING = object()
_MAX_DEPTH = 100
_FIELD = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Columns:
    """Which columns of a table hold what.

    Attributes:
        audio: column of the audio; None: the first of the usual names.
        captions: columns of the captions, each a string or a list; (): all columns with usual names.
        templates: captions made from other columns, such as "This is a sound of {category}.".
        split: column of the split; None: one split for all.
        split_map: renames values of the split column; "*" stands for all others.
        default_split: split where there is no column.
    """

    audio: str | None = None
    captions: tuple[str, ...] = ()
    templates: tuple[str, ...] = ()
    split: str | None = None
    split_map: Mapping[str, str] = field(default_factory=dict)
    default_split: str = "train"


def from_manifest(path: Path, columns: Columns, audio_root: Path | None = None) -> Source:
    """Reads a CSV, TSV or JSONL table. Rows that name the same file are one item with all their captions.

    Args:
        path: the table.
        columns: which columns hold what.
        audio_root: directory that relative audio paths start from; None: the table's.

    Raises:
        DataError: the table cannot be read, or a column is not there.
    """
    table = read_table(path)
    rows = table.rows
    if not rows:
        raise DataError(f"{path} has no rows")
    columns = resolve_columns(columns, list(dict.fromkeys(str(key) for row in rows for key in row)), str(path))
    root = audio_root if audio_root is not None else path.parent
    items: dict[str, Item] = {}
    num_duplicates = 0
    for number, row in enumerate(rows, start=1):
        item = row_to_item(row, columns, where=f"row {number}")
        name = row.get(columns.audio or "")
        if isinstance(name, str) and name.strip():
            item = replace(item, path=str(root / name.strip()))
            if item.reason is None and _URL.match(name.strip()):
                item = replace(item, reason=f"row {number}: a URL, and only local files are packed: download it first")
        num_duplicates += _merge(items, item, number)
    return listed(
        list(items.values()),
        num_rows=len(rows),
        num_duplicates=num_duplicates,
        find_extra=lambda: _unlisted({str(Path(item.path)) for item in items.values() if item.path}),
        content=table.digest,
    )


def _merge(items: dict[str, Item], item: Item, number: int) -> bool:
    """Adds a row to the items, which are known by path; True if it says nothing new."""
    apart = f"\0{number}"  # a key that is no path: the row stands for itself
    known = items.get(item.path) if item.path else None
    if known is None:
        items[item.path or apart] = item
    elif item.reason is not None:
        if known.reason is not None:
            return True
        items[apart] = item
    elif known.reason is not None:
        items[apart], items[item.path] = known, item
    elif item.split != known.split:
        items[apart] = replace(item, reason=f"the file is in split {known.split!r} already")
    else:
        captions = tuple(dict.fromkeys(known.captions + item.captions))
        tags = tuple(dict.fromkeys(known.tags + item.tags))
        says = {name: value for name, value in item.original.items() if value not in (None, "")}
        has = {name: value for name, value in known.original.items() if value not in (None, "")}
        if (captions, tags) == (known.captions, known.tags) and all(has.get(k, _NOTHING) == says[k] for k in says):
            return True
        original = {**item.original, **known.original, **says, **has}  # the first row that says something is right
        items[item.path] = replace(known, captions=captions, tags=tags, original=original)
    return False


def resolve_columns(columns: Columns, present: Sequence[str], place: str) -> Columns:
    """Fills in what was not named, and checks that what was named is there.

    Raises:
        DataError: a column is missing, with those that are there.
    """
    audio = columns.audio or next((name for name in AUDIO_COLUMNS if name in present), None)
    captions = columns.captions
    if not captions and not columns.templates:
        captions = tuple(name for name in present if CAPTION_COLUMNS.fullmatch(name) and name != audio)
    wanted = [audio, *captions, *(f for template in columns.templates for f in _FIELD.findall(template))]
    wanted += [columns.split] if columns.split else []
    missing = [name for name in wanted if name is not None and name not in present]
    if missing:
        raise DataError(f"{place} has no column {missing[0]!r}; it has {list(present)}")
    if audio is None:
        raise DataError(f"{place}: name the column of the audio with --audio-column; it has {list(present)}")
    if not captions and not columns.templates:
        raise DataError(
            f"{place}: name the captions with --caption-column, or make them with --caption-template "
            f"'This is a sound of {{COLUMN}}.'; it has the columns {list(present)}"
        )
    return replace(columns, audio=audio, captions=captions)


def row_to_item(row: Mapping[str, object], columns: Columns, *, where: str) -> Item:
    """One row as an item without its audio; what is wrong with it is its `reason`."""
    split, name = place_of_row(row, columns, where=where)
    if any(_is_deep(value) for value in row.values()):
        return Item(split, name, reason=f"{where}: nested too deeply")
    used = {columns.audio, columns.split, *columns.captions, *TAG_COLUMNS}
    original = {str(key): plain(value) for key, value in row.items() if key not in used and _is_plain(value)}
    item = Item(split, name, tags=read_tags(row), original=original)
    if columns.split and _split_of_row(row, columns) != split:
        wrong = _split_of_row(row, columns)
        return replace(item, reason=f"{where}: {wrong!r} cannot be the name of a split")
    if None in row:
        return replace(item, reason=f"{where}: has more cells than the header (quote captions that hold a comma)")
    if name == where:
        return replace(item, reason=f"{where}: names no audio")
    captions: list[str] = []
    reason = "no caption"
    for column in columns.captions:
        try:
            captions += usable_captions(row.get(column), column)
        except BadSampleError as error:
            reason = str(error)
    captions += [_fill(template, row) for template in columns.templates]
    captions = list(dict.fromkeys(caption for caption in captions if caption))
    return replace(item, captions=tuple(captions), reason=None if captions else f"{where}: {reason}")


def place_of_row(row: Mapping[str, object], columns: Columns, *, where: str) -> tuple[str, str]:
    """(split, name) of the item that a row becomes; needs the columns of the split and of the audio only."""
    audio = row.get(columns.audio or "")
    name = readable(audio.strip()) if isinstance(audio, str) and audio.strip() else where
    split = _split_of_row(row, columns)
    return (split if SPLIT_NAME.fullmatch(split) else columns.default_split), name


def _split_of_row(row: Mapping[str, object], columns: Columns) -> str:
    """What a row says its split is, renamed by the map; it may be no name for a directory."""
    if not columns.split:
        return columns.default_split
    cell = row.get(columns.split)
    value = "" if cell is None else str(cell).strip()
    return columns.split_map.get(value, columns.split_map.get("*", value))


def _fill(template: str, row: Mapping[str, object]) -> str:
    """A caption from a template; empty where a field of it is. Labels are often written with underscores."""
    values = {
        name: str(row.get(name) if row.get(name) is not None else "").strip() for name in _FIELD.findall(template)
    }
    if not all(values.values()):
        return ""
    return _FIELD.sub(lambda match: values[match.group(1)].replace("_", " "), template)


def _is_deep(value: object) -> bool:
    """Whether a value is nested more deeply than can be passed on and written as JSON wherever it is."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [inner for outer in level if isinstance(outer, list | dict) for inner in _inside(outer)]
        if not level:
            return False
    return True


def _inside(outer: list[object] | dict[object, object]) -> Iterable[object]:
    return outer.values() if isinstance(outer, dict) else outer


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, str | int | float | bool | list | dict)


def _unlisted(named: set[str]) -> list[str]:
    """Audio files that lie beside the listed ones and are not listed."""
    folders = sorted({Path(path).parent for path in named})
    beside = (entry for folder in folders if folder.is_dir() for entry in sorted(folder.iterdir()))
    unlisted = (p for p in beside if str(p) not in named and (split_name(p.name) or ("", ""))[1] in AUDIO_SUFFIXES)
    return [readable(str(path)) for path in unlisted]
