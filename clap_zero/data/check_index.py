"""Writes the indexes of split directories that were read whole and have none."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from clap_zero.data.check_worker import Opened
from clap_zero.data.index import ShardIndex
from clap_zero.data.pack_writer import INDEX_FILE, INDEX_VERSION, write_json
from clap_zero.data.patterns import natural_sorted
from clap_zero.data.places import is_pipe, is_remote, shown
from clap_zero.data.regular import read_text
from clap_zero.data.sizes import SIZES_FILE
from clap_zero.data.spans import SPAN_TYPE, SPANS_FILE, save_spans


class IndexFiles:
    """Gathers what sizes.json, index.json and spans.npy need while shards are read.

    Args:
        index: the shards.
        write: write what is missing.
        rewrite: write what is there, too.
        out: where the indexes of remote directories go, in a directory for each; None: nowhere.
    """

    def __init__(self, index: ShardIndex, *, write: bool, rewrite: bool, out: Path | None = None) -> None:
        self._index, self._write, self._rewrite, self._out = index, write or rewrite, rewrite, out
        self._num_pairs = np.full(index.num_shards, -1, dtype=np.int64)
        self._sizes_bytes = np.zeros(index.num_shards, dtype=np.int64)
        self._durations_s = np.zeros(index.num_shards)
        self._spans: dict[int, np.ndarray] = {}
        heads = {place: where.head for place, where in enumerate(index.places) if is_remote(where.head)}
        self._targets = dict(zip(heads, target_names([shown(head) for head in heads.values()]), strict=True))
        # Place -> names of the files to write for it.
        self._wanted = {place: self._missing(place) for place in range(len(index.places))} if self._write else {}

    def add(self, number: int, opened: Opened) -> None:
        """Takes what the headers of shard `number` say."""
        self._num_pairs[number], self._sizes_bytes[number] = opened.num_pairs, opened.size_bytes
        if SPANS_FILE in self._wanted.get(int(self._index.place_ids[number]), ()):
            self._spans[number] = opened.spans

    def add_duration(self, number: int, duration_s: float) -> None:
        """Takes the seconds of one sample of shard `number`."""
        self._durations_s[number] += duration_s

    def close(self) -> list[str]:
        """Writes the files.

        Returns:
            What was written, or why not: a line each.
        """
        lines: list[str] = []
        for place, wanted in self._wanted.items():
            if wanted:
                numbers = np.flatnonzero(self._index.place_ids == place).tolist()
                lines += self._directory(place, {self._index.names[number]: number for number in numbers}, wanted)
        return lines

    def _missing(self, place: int) -> list[str]:
        head = self._index.places[place].head
        if is_pipe(head) or not head.endswith("/"):
            return []
        files = [SIZES_FILE, INDEX_FILE, SPANS_FILE]
        if is_remote(head):
            return files if self._out is not None else []
        return [name for name in files if self._rewrite or not Path(head, name).exists()]

    def _directory(self, place: int, shards: dict[str, int], wanted: list[str]) -> list[str]:
        head = self._index.places[place].head
        target = Path(head)
        if is_remote(head):
            assert self._out is not None
            target = self._out / self._targets[place]
        sizes = self._sizes(head, shards)
        if sizes is None:
            return [f"no index of {shown(head)}: not all of its tars were read"]
        try:
            target.mkdir(parents=True, exist_ok=True)
            if SIZES_FILE in wanted:
                write_json(target / SIZES_FILE, sizes)
            if INDEX_FILE in wanted:
                write_json(target / INDEX_FILE, self._contents(shards, sizes))
            if SPANS_FILE in wanted:
                different = [name for name, size in sizes.items() if len(self._spans[shards[name]]) != size]
                if different:
                    return [f"no {SPANS_FILE} in {target}: {SIZES_FILE} counts {different[0]} otherwise"]
                rows = [self._spans[shards[name]] for name in sizes]
                save_spans(target / SPANS_FILE, np.concatenate([*rows, np.zeros(0, SPAN_TYPE)]))
        except OSError as error:
            return [f"no index in {target}: {error.strerror or error}"]
        source = f" for {shown(head)}" if is_remote(head) else ""
        return [f"wrote {target / name}{source}" for name in wanted]

    def _sizes(self, head: str, shards: dict[str, int]) -> dict[str, int] | None:
        """The counts of all tars of a directory; None where one was not read."""
        there, counts = set(shards), self._num_pairs
        if not is_remote(head):
            if self._rewrite or not Path(head, SIZES_FILE).exists():
                there = {p.name for p in Path(head).iterdir() if p.suffix == ".tar" and not p.name.startswith(".")}
            else:
                there, counts = set(json.loads(read_text(Path(head, SIZES_FILE)))), self._index.sizes
        if there - set(shards) or any(self._num_pairs[number] < 0 for number in shards.values()):
            return None
        return {name: int(counts[shards[name]]) for name in natural_sorted(shards)}

    def _contents(self, shards: dict[str, int], sizes: dict[str, int]) -> dict[str, object]:
        """What stands in index.json. Other than in a packed split the clips may have any sampling rate."""
        return {
            "version": INDEX_VERSION,
            "num_pairs": sum(sizes.values()),
            "num_rejected": 0,
            "sample_rate_hz": None,
            "duration_s": float(self._durations_s[list(shards.values())].sum()),
            "shards": [
                {"name": name, "num_pairs": size, "size_bytes": int(self._sizes_bytes[shards[name]])}
                for name, size in sizes.items()
            ],
        }


def target_names(heads: Sequence[str]) -> list[str]:
    """Relative directories for what belongs to remote ones, all different: the last parts of each, as many as it takes.

    Args:
        heads: remote directories without their secrets.
    """
    parts = [[part for part in head.replace("://", "/").split("/") if part not in ("", ".", "..")] for head in heads]
    names: list[str] = []
    for count in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(words[-count:]) for words in parts]
        if len(set(names)) == len(names):
            return names
    # They differ in what is not shown.
    return [f"{name}-{number}" for number, name in enumerate(names)]
