"""Items from a Hugging Face dataset: a name, a directory, or what `save_to_disk` wrote. Audio is decoded by us."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from clap_zero.data.pack_sources import Columns, Item, Source, from_manifest, resolve_columns, row_to_item
from clap_zero.data.shards import AUDIO_SUFFIXES
from clap_zero.errors import DataError

_METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")


def from_dataset(name: str, columns: Columns, *, config: str | None = None) -> Source:
    """All rows of all splits of a dataset.

    A directory whose table is not called metadata.*, such as ESC-50's audio/ and meta/esc50.csv, is read as a manifest.

    Args:
        name: name on the hub, or a directory.
        columns: which columns hold what; the audio column is found by its type.
        config: configuration of the dataset, where it has several.

    Raises:
        DataError: the dataset cannot be read, or a column is not there.
    """
    directory = Path(name).expanduser()
    table = _own_table(directory) if directory.is_dir() else None
    if table is not None:
        return from_manifest(table, columns, _audio_root(directory))
    splits = _load(name, directory, config, columns.default_split)
    total = sum(len(split) for split in splits.values())
    # Each split by itself: one may have a column more, or its captions under another name.
    by_split = {split_name: _columns(columns, split, name) for split_name, split in splits.items()}
    return Source(_rows(splits, by_split, name), total, total)


def _load(name: str, directory: Path, config: str | None, default_split: str) -> Mapping[str, Any]:
    import datasets  # imported here: it takes seconds, and only this source needs it

    try:
        if (directory / "dataset_dict.json").is_file() or (directory / "state.json").is_file():
            loaded = datasets.load_from_disk(str(directory))
        else:
            loaded = datasets.load_dataset(str(directory) if directory.is_dir() else name, config)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"the dataset {name} cannot be loaded: {str(error).splitlines()[0]}") from error
    return loaded if isinstance(loaded, dict) else {default_split: loaded}


def _columns(columns: Columns, split: Any, name: str) -> Columns:
    import datasets

    if columns.audio is None:
        typed = [key for key, feature in split.features.items() if isinstance(feature, datasets.Audio)]
        columns = replace(columns, audio=typed[0] if typed else None)
    return resolve_columns(columns, split.column_names, name)


def _rows(splits: Mapping[str, Any], by_split: Mapping[str, Columns], name: str) -> Iterator[Item]:
    import datasets

    for split_name, split in splits.items():
        columns = by_split[split_name]
        here = replace(columns, default_split=columns.split_map.get(split_name, split_name))
        if isinstance(split.features[columns.audio], datasets.Audio):
            split = split.cast_column(columns.audio, datasets.Audio(decode=False))
        labels = {key: f for key, f in split.features.items() if isinstance(f, datasets.ClassLabel)}
        for number, row in enumerate(split):
            for key, feature in labels.items():
                known = row[key] is not None and row[key] >= 0
                row[key] = feature.int2str(row[key]) if known else None
            yield _item(row, here, where=f"{split_name} row {number}", place=name)


def _item(row: dict[str, Any], columns: Columns, *, where: str, place: str) -> Item:
    assert columns.audio is not None
    audio = row[columns.audio]
    if not isinstance(audio, dict):  # a column of paths
        item = row_to_item(row, columns, where=where)
        found = Path(place) / str(audio) if Path(place).is_dir() else Path(str(audio))
        return replace(item, path=str(found)) if isinstance(audio, str) else item
    data, path = audio.get("bytes"), audio.get("path") or ""
    if data is None and not path:
        return row_to_item({**row, columns.audio: None}, columns, where=where)
    item = row_to_item({**row, columns.audio: Path(path).name or where.replace(" ", "-")}, columns, where=where)
    return replace(item, audio=data, path="" if data is not None else path)


def _own_table(directory: Path) -> Path | None:
    """The only table of a directory of audio files that `datasets` would not connect with them."""
    if any((directory / name).is_file() for name in ("dataset_dict.json", "state.json", "README.md")):
        return None  # saved to disk, or described by a card
    if any(next(directory.rglob(name), None) for name in _METADATA):
        return None
    tables = [p for pattern in ("*.csv", "*.tsv", "*.jsonl", "meta/*.csv") for p in sorted(directory.glob(pattern))]
    has_audio = any(p.suffix.lower() in AUDIO_SUFFIXES for p in directory.rglob("*"))
    return tables[0] if len(tables) == 1 and has_audio else None


def _audio_root(directory: Path) -> Path:
    """Where the names in a table start from: ESC-50 leaves `audio/` out."""
    return directory / "audio" if (directory / "audio").is_dir() else directory
