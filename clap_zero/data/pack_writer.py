"""Writes one split in LAION's layout: tars of FLAC and json, sizes.json, index.json, rejected.jsonl."""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
from pathlib import Path

from clap_zero.data.index import SIZES_FILE
from clap_zero.data.pack_audio import SAMPLE_RATE_HZ, Encoded

INDEX_FILE, REJECTED_FILE = "index.json", "rejected.jsonl"
INDEX_VERSION = 1
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]+")
_KEY_LENGTH = 80


class SplitWriter:
    """Takes the encoded items of a split in their order.

    Args:
        directory: an empty directory.
        shard_size: pairs in a tar.
    """

    def __init__(self, directory: Path, shard_size: int) -> None:
        self.directory = directory
        self._shard_size = shard_size
        self._keys: set[str] = set()
        self._tar: tarfile.TarFile | None = None
        self._sizes: dict[str, int] = {}
        self._sizes_bytes: dict[str, int] = {}
        self._rejected = (directory / REJECTED_FILE).open("w", encoding="utf-8")
        self.num_rejected = 0
        self.num_samples = 0

    @property
    def num_pairs(self) -> int:
        """Pairs written."""
        return sum(self._sizes.values())

    @property
    def num_shards(self) -> int:
        """Tars begun."""
        return len(self._sizes)

    def add(self, encoded: Encoded) -> None:
        """Writes a pair."""
        assert encoded.flac is not None
        name = f"{max(0, len(self._sizes) - 1)}.tar"
        if self._tar is None or self._sizes[name] == self._shard_size:
            self._close_tar()
            name = f"{len(self._sizes)}.tar"
            self._tar = tarfile.open(self.directory / name, "w", format=tarfile.USTAR_FORMAT)  # noqa: SIM115
            self._sizes[name] = 0
        item = encoded.item
        record = {
            "text": list(item.captions),
            "tag": list(item.tags),
            "original_data": {**item.original, "name": item.name, **_faults(encoded)},
        }
        key = self._key(item.name)
        self._add_member(f"{key}.flac", encoded.flac)
        self._add_member(f"{key}.json", json.dumps(record, ensure_ascii=False, default=str).encode("utf-8", "replace"))
        self._sizes[name] += 1
        self.num_samples += encoded.num_samples

    def reject(self, name: str, reason: str) -> None:
        """Notes an item that is not packed."""
        self.num_rejected += 1
        self._rejected.write(json.dumps({"file": name, "reason": reason}, ensure_ascii=True) + "\n")

    def take_rejected(self, other: SplitWriter) -> None:
        """Adds the rejected items of a split that gets no directory."""
        other._rejected.close()
        self._rejected.write((other.directory / REJECTED_FILE).read_text("utf-8"))
        self.num_rejected += other.num_rejected

    def close(self) -> None:
        """Writes the indexes; everything is on the disk afterwards."""
        self._close_tar()
        self._rejected.close()
        index = {
            "version": INDEX_VERSION,
            "num_pairs": self.num_pairs,
            "num_rejected": self.num_rejected,
            "sample_rate_hz": SAMPLE_RATE_HZ,
            "duration_s": self.num_samples / SAMPLE_RATE_HZ,
            "shards": [
                {"name": name, "num_pairs": self._sizes[name], "size_bytes": size}
                for name, size in self._sizes_bytes.items()
            ],
        }
        _write_json(self.directory / INDEX_FILE, index)
        _write_json(self.directory / SIZES_FILE, self._sizes)

    def abandon(self) -> None:
        """Closes the files of a split that is not finished."""
        self._rejected.close()
        if self._tar is not None and self._tar.fileobj is not None:
            self._tar.fileobj.close()

    def _close_tar(self) -> None:
        if self._tar is not None:
            path = Path(str(self._tar.name))
            self._tar.close()
            self._tar = None
            with path.open("rb+") as file:
                os.fsync(file.fileno())
            self._sizes_bytes[path.name] = path.stat().st_size

    def _add_member(self, name: str, data: bytes) -> None:
        """Adds a file. Equal input gives equal tars: no times, no owners."""
        assert self._tar is not None
        info = tarfile.TarInfo(name)
        info.size = len(data)
        self._tar.addfile(info, io.BytesIO(data))

    def _key(self, name: str) -> str:
        """A name for the members: safe in every file system and shell, without dots, unique also in lower case."""
        stem = Path(name).name
        stem = stem[: stem.rfind(".")] if "." in stem[1:] else stem
        base = _UNSAFE.sub("_", stem).strip("_-")[:_KEY_LENGTH] or "clip"
        key, number = base, 1
        while key.lower() in self._keys:
            number += 1
            key = f"{base}-{number}"
        self._keys.add(key.lower())
        return key


def _write_json(path: Path, value: object) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())


def _faults(encoded: Encoded) -> dict[str, object]:
    """What a reader of the shard should know about how a clip was made."""
    faults: dict[str, object] = {"cut": True} if encoded.cut else {}
    if encoded.note is not None:
        faults["damaged"] = encoded.note
    return faults
