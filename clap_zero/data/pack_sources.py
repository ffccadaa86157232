"""What is to be packed: items from a manifest (CSV, TSV, JSONL) or from a folder with sidecar files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from clap_zero.data.captions import read_captions, usable_captions
from clap_zero.data.pack_tables import read_table
from clap_zero.data.shards import AUDIO_SUFFIXES, TEXT_SUFFIXES, BadSampleError, split_name
from clap_zero.errors import DataError

AUDIO_COLUMNS = ("audio", "file", "file_name", "filename", "path", "audio_path", "audio_filepath", "wav")
CAPTION_COLUMNS = re.compile(r"(captions?|text|sentence|description)([ _]?\d+)?", re.IGNORECASE)
TAG_COLUMNS = ("tag", "tags")
SPLIT_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
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


@dataclass(frozen=True)
class Item:
    """One clip to pack.

    Attributes:
        split: its split.
        name: how the user knows it; for messages and for the json.
        path: audio file, or "" where `audio` holds the bytes.
        captions: at least one, unless there is a `reason`.
        tags: labels.
        original: other columns.
        audio: bytes of the audio file.
        reason: why it cannot be packed, where that is known already.
    """

    split: str
    name: str
    path: str = ""
    captions: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    original: Mapping[str, object] = field(default_factory=dict)
    audio: bytes | None = None
    reason: str | None = None

    def without_bytes(self) -> Item:
        """The item without its audio, to travel between processes."""
        return replace(self, audio=None)


@dataclass
class Source:
    """The items of a source and what was noticed while they were listed.

    Attributes:
        items: in their order; may be read once only.
        num_items: how many there are.
        num_rows: rows of the table, or files.
        num_duplicates: rows that say what an earlier row said.
        extra: audio files beside the listed ones that no row names, or texts without audio.
    """

    items: Iterable[Item]
    num_items: int
    num_rows: int
    num_duplicates: int = 0
    extra: list[str] = field(default_factory=list)


def from_manifest(path: Path, columns: Columns, audio_root: Path | None = None) -> Source:
    """Reads a CSV, TSV or JSONL table. Rows that name the same file are one item with all their captions.

    Args:
        path: the table.
        columns: which columns hold what.
        audio_root: directory that relative audio paths start from; None: the table's.

    Raises:
        DataError: the table cannot be read, or a column is not there.
    """
    rows = read_table(path)
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
        num_duplicates += _merge(items, item, number)
    listed = {str(Path(item.path)) for item in items.values() if item.path}
    return Source(items.values(), len(items), len(rows), num_duplicates, _unlisted(listed))


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
        if captions == known.captions:
            return True
        items[item.path] = replace(known, captions=captions)
    return False


def from_folder(folder: Path, split: str, caption_key: str = "text") -> Source:
    """All audio files below a folder, each with a .json or .txt of the same name beside it.

    Args:
        folder: searched with all folders in it.
        split: split of all items.
        caption_key: key of the captions in a .json.

    Raises:
        DataError: there is no audio file.
    """
    texts: dict[str, dict[str, Path]] = {}
    audio: list[tuple[str, Path]] = []
    for path in sorted(folder.rglob("*")):
        parts = split_name(path.relative_to(folder).as_posix())
        if parts is None or not path.is_file():
            continue
        key, suffix = parts
        if suffix in TEXT_SUFFIXES:
            texts.setdefault(key, {})[suffix] = path
        elif suffix:
            audio.append((key, path))
    if not audio:
        raise DataError(f"{folder} holds no audio files ({' '.join(AUDIO_SUFFIXES)})")
    items = [_with_sidecar(folder, path, texts.get(key, {}), split, caption_key) for key, path in audio]
    used = {key for key, _ in audio}
    extra = [str(path) for key, found in texts.items() if key not in used for path in found.values()]
    return Source(items, len(items), len(items), extra=extra)


def _with_sidecar(folder: Path, path: Path, texts: Mapping[str, Path], split: str, caption_key: str) -> Item:
    item = Item(split, path.relative_to(folder).as_posix(), str(path))
    if not texts:
        return replace(item, reason="no .json or .txt beside it")
    try:
        data = {suffix: text.read_bytes() for suffix, text in texts.items()}
        captions = read_captions(data, caption_key)
    except (OSError, BadSampleError) as error:
        return replace(item, reason=str(error))
    record = json.loads(data[".json"]) if ".json" in data else {}
    original = {key: value for key, value in record.items() if key not in (caption_key, *TAG_COLUMNS)}
    return replace(item, captions=tuple(captions), tags=_tags(record), original=original)


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
    audio = row.get(columns.audio or "")
    name = audio.strip() if isinstance(audio, str) and audio.strip() else where
    split = columns.default_split
    if columns.split:
        value = str(row.get(columns.split) or "").strip()
        split = columns.split_map.get(value, columns.split_map.get("*", value))
    used = {columns.audio, columns.split, *columns.captions, *TAG_COLUMNS}
    original = {key: value for key, value in row.items() if key not in used and _is_plain(value)}
    item = Item(split, name, tags=_tags(row), original=original)
    if not SPLIT_NAME.fullmatch(split):
        return replace(item, split=columns.default_split, reason=f"{where}: {split!r} cannot be the name of a split")
    if None in row:
        return replace(item, reason=f"{where} has more cells than the header: quote captions that hold a comma")
    if name == where:
        return replace(item, reason=f"{where} names no audio")
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


def _fill(template: str, row: Mapping[str, object]) -> str:
    """A caption from a template; empty where a field of it is. Labels are often written with underscores."""
    values = {
        name: str(row.get(name) if row.get(name) is not None else "").strip() for name in _FIELD.findall(template)
    }
    if not all(values.values()):
        return ""
    return _FIELD.sub(lambda match: values[match.group(1)].replace("_", " "), template)


def _tags(row: Mapping[str, object]) -> tuple[str, ...]:
    for name in TAG_COLUMNS:
        value = row.get(name)
        if isinstance(value, str) and value.strip():
            return (value.strip(),)
        if isinstance(value, list):
            return tuple(str(tag) for tag in value)
    return ()


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, str | int | float | bool | list | dict)


def _unlisted(listed: set[str]) -> list[str]:
    """Audio files that lie beside the listed ones and are not listed."""
    folders = sorted({Path(path).parent for path in listed})
    beside = (entry for folder in folders if folder.is_dir() for entry in sorted(folder.iterdir()))
    return [str(p) for p in beside if str(p) not in listed and (split_name(p.name) or ("", ""))[1] in AUDIO_SUFFIXES]
