"""Items from a Hugging Face dataset: a name, a directory, or what `save_to_disk` wrote. Audio is decoded by us."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from clap_zero.data.members import AUDIO_SUFFIXES
from clap_zero.data.pack_items import Item, Source
from clap_zero.data.pack_sources import Columns, from_manifest, place_of_row, resolve_columns, row_to_item
from clap_zero.errors import DataError

_BATCH = 1000
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
    return Source(
        total,
        lambda: _names(splits, by_split),
        lambda share: _rows(splits, by_split, share, place=name),
        total,
    )


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


def _prepared(splits: Mapping[str, Any], by_split: Mapping[str, Columns]) -> Iterator[tuple[str, Any, Columns]]:
    """(name, split whose audio stays undecoded, its columns) of all splits, in their order."""
    import datasets

    for split_name, split in splits.items():
        columns = by_split[split_name]
        here = replace(columns, default_split=columns.split_map.get(split_name, split_name))
        if isinstance(split.features[columns.audio], datasets.Audio):
            split = split.cast_column(columns.audio, datasets.Audio(decode=False))
        yield split_name, split, here


def _names(splits: Mapping[str, Any], by_split: Mapping[str, Columns]) -> Iterator[tuple[str, str]]:
    """(split, name) of every row, from the few columns that say it: no audio is read."""
    for split_name, split, columns in _prepared(splits, by_split):
        audio = columns.audio
        wanted = {audio, columns.split} - {None}
        light = split.select_columns([name for name in split.column_names if name in wanted]).flatten()
        if f"{audio}.bytes" in light.column_names:
            light = light.remove_columns(f"{audio}.bytes")
        has_paths = audio in light.column_names
        labels, number = _labels(light), 0
        for batch in light.iter(_BATCH):
            for cells in zip(*batch.values(), strict=True):
                row = dict(zip(batch, cells, strict=True))
                _name_labels(row, labels)
                where = f"{split_name} row {number}"
                number += 1
                if not has_paths or not isinstance(row[audio], str):
                    row[audio] = _shown(row.get(f"{audio}.path"), where)
                yield place_of_row(row, columns, where=where)


def _rows(splits: Mapping[str, Any], by_split: Mapping[str, Columns], share: range, *, place: str) -> Iterator[Item]:
    first = 0
    for split_name, split, columns in _prepared(splits, by_split):
        inside = range(max(share.start - first, 0), min(share.stop - first, len(split)))
        first += len(split)
        if not inside:
            continue
        labels = _labels(split)
        for number, row in zip(inside, split.select(inside), strict=True):
            _name_labels(row, labels)
            yield _item(row, columns, where=f"{split_name} row {number}", place=place)


def _labels(split: Any) -> dict[str, Any]:
    import datasets

    return {key: feature for key, feature in split.features.items() if isinstance(feature, datasets.ClassLabel)}


def _name_labels(row: dict[str, Any], labels: Mapping[str, Any]) -> None:
    """Puts the names of classes in the place of their numbers."""
    for key, feature in labels.items():
        row[key] = feature.int2str(row[key]) if row[key] is not None and row[key] >= 0 else None


def _shown(path: str | None, where: str) -> str:
    """How the user knows audio that comes with its bytes."""
    return Path(path or "").name or where.replace(" ", "-")


def _item(row: dict[str, Any], columns: Columns, *, where: str, place: str) -> Item:
    assert columns.audio is not None
    audio = row[columns.audio]
    if isinstance(audio, str):  # a column of paths
        item = row_to_item(row, columns, where=where)
        return replace(item, path=str(Path(place) / audio if Path(place).is_dir() else Path(audio)))
    data, path = (audio.get("bytes"), audio.get("path")) if isinstance(audio, dict) else (None, None)
    item = row_to_item({**row, columns.audio: _shown(path, where)}, columns, where=where)
    if data is None and not path:
        return replace(item, reason=item.reason or f"{where}: names no audio")
    return replace(item, audio=data, path="" if data is not None else str(path))


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
