"""Rows of a manifest: CSV, TSV or JSONL."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clap_zero.audio.kinds import AudioError
from clap_zero.data.pack_files import read_file
from clap_zero.errors import DataError

_MAX_TABLE_BYTES = 1 << 36
_OTHERS = (
    (b"PAR1", "a Parquet file: give the directory that it lies in with --dataset"),
    (b"PK\x03\x04", "a spreadsheet or a ZIP: save the table as CSV"),
    (b"\x1f\x8b", "compressed: unpack it with gunzip"),
)


@dataclass(frozen=True)
class Table:
    """A manifest.

    Attributes:
        rows: each row by column; a row with too many cells has them under the key None.
        digest: SHA-256 of the file.
    """

    rows: list[dict[str, object]]
    digest: str


def read_table(path: Path) -> Table:
    """All rows of a CSV, TSV or JSONL file, UTF-8 with or without a mark, with any line ends.

    Args:
        path: the table; its kind is told by the suffix, tabs or semicolons in the header of a .csv are accepted.

    Raises:
        DataError: it cannot be read, with the line.
    """
    try:
        data = read_file(str(path), max_bytes=_MAX_TABLE_BYTES)
        other = next((words for magic, words in _OTHERS if data.startswith(magic)), None)
        if other is not None:
            raise DataError(f"{path} is {other}")
        text = data.decode("utf-8-sig")
    except AudioError as error:
        raise DataError(f"{path}: {error}") from error
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}:{line} is not UTF-8 ({error.reason}): save the table as UTF-8 text") from error
    digest = hashlib.sha256(data).hexdigest()
    if path.suffix.lower() in (".jsonl", ".ndjson", ".json"):
        return Table(_read_jsonl(path, text), digest)
    return Table(_read_csv(path, text), digest)


def _read_csv(path: Path, text: str) -> list[dict[str, object]]:
    """Rows of a CSV or TSV. Strict about quotes: one that is never closed would swallow all rows behind it."""
    csv.field_size_limit(1 << 30)
    first = text.partition("\n")[0]
    delimiter = next((mark for mark in ",\t;" if mark in first), ",")
    reader = csv.reader(
        io.StringIO(text, newline=""), delimiter="\t" if path.suffix.lower() == ".tsv" else delimiter, strict=True
    )
    try:
        header = [name.strip() for name in next(reader, [])]
        doubled = [name for name, count in Counter(filter(None, header)).items() if count > 1]
        if doubled:
            raise DataError(f"{path} has two columns {doubled[0]!r}: rename one")
        rows: list[dict[Any, object]] = []
        for cells in reader:
            if not cells:
                continue
            row: dict[Any, object] = dict(zip(header, cells, strict=False))
            row.update(dict.fromkeys(header[len(cells) :]))
            if len(cells) > len(header):
                row[None] = cells[len(header) :]
            rows.append(row)
    except csv.Error as error:
        raise DataError(
            f"{path}:{reader.line_num} is not a valid CSV: {error}; a cell that starts with a quote ends with one, and "
            "quotes inside it are doubled"
        ) from error
    return rows


def _read_jsonl(path: Path, text: str) -> list[dict[str, object]]:
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{path}:{number} is not valid JSON ({error}); a JSONL manifest has one object a line"
            ) from error
        if not isinstance(row, dict):
            raise DataError(f'{path}:{number} is not an object such as {{"file": ..., "caption": ...}}')
        rows.append(row)
    return rows
