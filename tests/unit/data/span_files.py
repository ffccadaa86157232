"""Writes spans.npy for shards that the tests made, by reading them again: what packing writes has to be the same."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from clap_zero.data.members import scan_shard
from clap_zero.data.patterns import natural_sorted
from clap_zero.data.spans import SPAN_TYPE, SPANS_FILE, contents_rows, save_spans


def span_rows(path: str | Path) -> np.ndarray:
    """Rows of one local tar, SPAN_TYPE (num complete pairs,)."""
    return contents_rows(scan_shard(str(path)))


def write_spans(directory: Path) -> Path:
    """Writes spans.npy of a split directory with sizes.json, which has to be right."""
    sizes = json.loads((directory / "sizes.json").read_text())
    rows = [span_rows(directory / name) for name in natural_sorted(sizes)]
    assert [len(found) for found in rows] == [sizes[name] for name in natural_sorted(sizes)]
    save_spans(directory / SPANS_FILE, np.concatenate([*rows, np.zeros(0, SPAN_TYPE)]))
    return directory / SPANS_FILE
