"""Writes one split in LAION's layout: tars of audio and json, and beside them what index_split writes."""

from __future__ import annotations

import json
import os
import tarfile
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from clap_zero.data.pack_encoding import SAMPLE_RATE_HZ, Encoded, Encoding
from clap_zero.data.pack_files import plain
from clap_zero.data.pack_report import REJECTED_FILE, SplitReport
from clap_zero.data.sizes import SIZES_FILE
from clap_zero.data.spans import SPAN_TYPE, SPANS_FILE, save_spans

INDEX_FILE = "index.json"
INDEX_VERSION = 1
_WRITE_BUFFER_BYTES = 1 << 20
_MAX_SPAN_BYTES = 2**32 - 1


@dataclass
class SplitNumbers:
    """What is known of the tars of a split.

    Attributes:
        shards: (name, pairs, bytes) of each tar.
        num_rejected: items that were not packed.
        num_samples: length of all audio at 48 kHz.
    """

    shards: list[tuple[str, int, int]] = field(default_factory=list)
    num_rejected: int = 0
    num_samples: int = 0

    @property
    def num_pairs(self) -> int:
        """Pairs in the tars."""
        return sum(num_pairs for _, num_pairs, _ in self.shards)

    @property
    def duration_s(self) -> float:
        """Length of all audio in seconds."""
        return self.num_samples / SAMPLE_RATE_HZ

    def report(self, directory: Path) -> SplitReport:
        """The same for people."""
        return SplitReport(directory, self.num_pairs, len(self.shards), self.num_rejected, self.duration_s)

    def to_json(self) -> dict[str, Any]:
        """For `from_json`."""
        return {"shards": self.shards, "num_rejected": self.num_rejected, "num_samples": self.num_samples}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> SplitNumbers:
        """What `to_json` gave."""
        return cls(
            [(str(n), int(k), int(s)) for n, k, s in value["shards"]], value["num_rejected"], value["num_samples"]
        )


def index_split(directory: Path, numbers: SplitNumbers, spans: np.ndarray, encoding: dict[str, Any]) -> None:
    """Writes index.json, spans.npy and, last, sizes.json beside the tars of a split.

    Args:
        directory: the split.
        numbers: of its tars.
        spans: SPAN_TYPE (num_pairs,), in the order of the tars.
        encoding: what `encoding_json` says.
    """
    index = {
        "version": INDEX_VERSION,
        "num_pairs": numbers.num_pairs,
        "num_rejected": numbers.num_rejected,
        "sample_rate_hz": SAMPLE_RATE_HZ,
        "duration_s": numbers.duration_s,
        **encoding,
        "shards": [{"name": name, "num_pairs": num, "size_bytes": size} for name, num, size in numbers.shards],
    }
    write_json(directory / INDEX_FILE, index)
    save_spans(directory / SPANS_FILE, spans)
    write_json(directory / SIZES_FILE, {name: num for name, num, _ in numbers.shards})


def encoding_json(encoding: Encoding) -> dict[str, Any]:
    """What index.json says about how clips are stored."""
    return {"store": encoding.store, "truncation": encoding.truncation}


class SplitWriter:
    """Takes the encoded items of a split in their order.

    Tars go to the disk in a thread of their own, one behind the one that is being written, so that a slow disk holds
    up nobody until it is really too slow.

    Args:
        directory: an empty directory.
        shard_size: pairs in a tar.
        encoding: how the clips are stored.
    """

    def __init__(self, directory: Path, shard_size: int, encoding: Encoding) -> None:
        self.directory = directory
        self.numbers = SplitNumbers()
        self._shard_size = shard_size
        self._encoding = encoding
        self._tar: _Tar | None = None
        self._spans: list[tuple[int, int]] = []
        self._rejected = (directory / REJECTED_FILE).open("w", encoding="utf-8")
        self._closer = ThreadPoolExecutor(1, thread_name_prefix="close-tar")
        self._closing: Future[None] | None = None

    def add(self, encoded: Encoded) -> None:
        """Writes a pair."""
        assert encoded.data is not None and encoded.item.key
        if self._tar is None:
            self._tar = _Tar(self.directory / f"{len(self.numbers.shards)}.tar")
        item = encoded.item
        record = {
            "text": list(item.captions),
            "tag": list(item.tags),
            "original_data": {**item.original, "name": item.name, **_faults(encoded)},
        }
        start = self._tar.size_bytes
        self._tar.add(f"{item.key}.{self._encoding.store}", encoded.data)
        self._tar.add(f"{item.key}.json", json.dumps(plain(record), ensure_ascii=False).encode("utf-8"))
        length = self._tar.size_bytes - start
        self._spans.append((start, length) if length <= _MAX_SPAN_BYTES else (0, 0))
        self._tar.num_pairs += 1
        self.numbers.num_samples += encoded.num_samples
        if self._tar.num_pairs == self._shard_size:
            self._close_tar()

    def reject(self, name: str, reason: str) -> None:
        """Notes an item that is not packed."""
        self.numbers.num_rejected += 1
        self._rejected.write(json.dumps({"file": name, "reason": reason}, ensure_ascii=True) + "\n")

    def take_rejected(self, other: SplitWriter) -> None:
        """Adds the rejected items of a split that gets no directory."""
        other._rejected.close()
        self._rejected.write((other.directory / REJECTED_FILE).read_text("utf-8"))
        self.numbers.num_rejected += other.numbers.num_rejected

    def finish(self) -> None:
        """Ends the last tar: `numbers` are complete."""
        if self._tar is not None:
            self._close_tar()

    def close(self) -> None:
        """Writes the indexes; everything is on the disk afterwards."""
        self.finish()
        self._wait()
        self._closer.shutdown()
        self._rejected.flush()
        os.fsync(self._rejected.fileno())
        self._rejected.close()
        spans = np.array(self._spans, dtype=SPAN_TYPE)
        index_split(self.directory, self.numbers, spans, encoding_json(self._encoding))

    def abandon(self) -> None:
        """Closes the files of a split that is not finished."""
        self._closer.shutdown(cancel_futures=True)
        self._rejected.close()
        if self._tar is not None:
            self._tar.file.close()

    def _close_tar(self) -> None:
        assert self._tar is not None
        tar, self._tar = self._tar, None
        tar.end()
        self.numbers.shards.append((tar.path.name, tar.num_pairs, tar.size_bytes))
        self._wait()
        self._closing = self._closer.submit(tar.close)

    def _wait(self) -> None:
        """Until the previous tar is on the disk. Its error, such as a full disk, is raised here."""
        if self._closing is not None:
            closing, self._closing = self._closing, None
            closing.result()


class _Tar:
    """A tar that is being written. Equal input gives equal tars: no times, no owners."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_pairs = 0
        self.size_bytes = 0
        self.file: BinaryIO = path.open("wb", buffering=_WRITE_BUFFER_BYTES)

    def add(self, name: str, data: bytes | memoryview) -> None:
        self._write(_header(name, len(data)))
        self._write(data)
        self._write(bytes(-len(data) % tarfile.BLOCKSIZE))

    def end(self) -> None:
        """Two empty blocks, and more up to a whole record, as tar itself does it."""
        self._write(bytes(2 * tarfile.BLOCKSIZE))
        self._write(bytes(-self.size_bytes % tarfile.RECORDSIZE))

    def close(self) -> None:
        with self.file:
            self.file.flush()
            os.fsync(self.file.fileno())

    def _write(self, data: bytes | memoryview) -> None:
        self.file.write(data)
        self.size_bytes += len(data)


_EMPTY_HEADER = tarfile.TarInfo().tobuf(tarfile.USTAR_FORMAT)


def _header(name: str, size_bytes: int) -> bytes:
    """What tarfile makes of a name of up to 100 ASCII characters and a size, in a tenth of the time."""
    head = bytearray(_EMPTY_HEADER)
    head[: len(name)] = name.encode("ascii")
    head[124:135] = b"%011o" % size_bytes
    head[148:156] = b" " * 8  # the checksum is that of a header with spaces in its place
    head[148:155] = b"%06o\0" % sum(head)
    return bytes(head)


def write_json(path: Path, value: object) -> None:
    """Writes a JSON file: whole, or not at all."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    with part.open("w", encoding="utf-8") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def _faults(encoded: Encoded) -> dict[str, object]:
    """What a reader of the shard should know about how a clip was made."""
    faults: dict[str, object] = {"cut": True} if encoded.cut else {}
    if encoded.note is not None:
        faults["damaged"] = encoded.note
    return faults
