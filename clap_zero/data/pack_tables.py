"""Rows of a manifest: CSV, TSV or JSONL."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

from clap_zero.errors import DataError


def read_table(path: Path) -> list[dict[str, object]]:
    """All rows of a CSV, TSV or JSONL file, UTF-8 with or without a mark. A row with too many cells has the key None.

    Args:
        path: the table; its kind is told by the suffix, tabs in the header of a .csv are accepted.

    Raises:
        DataError: it cannot be read, with the line.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}; a manifest is UTF-8 text") from error
    if path.suffix.lower() in (".jsonl", ".ndjson", ".json"):
        return _read_jsonl(path, text)
    csv.field_size_limit(1 << 30)
    header = text.partition("\n")[0]
    delimiter = "\t" if path.suffix.lower() == ".tsv" or ("\t" in header and "," not in header) else ","
    try:
        return list(csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter))
    except csv.Error as error:
        raise DataError(f"{path} is not a valid CSV: {error}") from error


def _read_jsonl(path: Path, text: str) -> list[dict[str, object]]:
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(
                f"{path}:{number} is not valid JSON ({error}); a JSONL manifest has one object a line"
            ) from error
        if not isinstance(row, dict):
            raise DataError(f'{path}:{number} is not an object such as {{"file": ..., "caption": ...}}')
        rows.append(row)
    return rows
