"""Writing files so that a crash, a full disk or a torn write can always be told from a good file.

Everything here is plain files: no torch.distributed, no DeepSpeed. The checksum is CRC-32 of the whole file, computed
while the bytes pass through, so that it costs no second reading (about 1 GB/s and more on one core).
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

READ_BLOCK_BYTES = 8 << 20

SAFETENSORS_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class FileRecord:
    """What the manifest says of one file.

    Attributes:
        size_bytes: Length of the file.
        crc32: CRC-32 of all its bytes, 8 hexadecimal digits.
    """

    size_bytes: int
    crc32: str


class ChecksummedFile:
    """A file opened for writing from its start to its end that counts and checksums what it is given.

    Closing without an error flushes it to the disk (fsync). It has the `write` and `flush` that `torch.save` needs.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._file = self.path.open("wb")
        self._crc = 0
        self._size = 0

    def write(self, data: bytes | memoryview) -> int:
        """Appends data and returns its length in bytes."""
        self._file.write(data)
        self._crc = zlib.crc32(data, self._crc)
        num_bytes = memoryview(data).nbytes
        self._size += num_bytes
        return num_bytes

    def flush(self) -> None:
        """Hands buffered bytes to the operating system."""
        self._file.flush()

    @property
    def record(self) -> FileRecord:
        """Size and checksum of what was written so far."""
        return FileRecord(self._size, f"{self._crc:08x}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())
        finally:
            self._file.close()


def checksum_file(path: Path) -> FileRecord:
    """Reads a file once and returns its size and checksum."""
    crc, size = 0, 0
    with Path(path).open("rb") as file:
        while block := file.read(READ_BLOCK_BYTES):
            crc = zlib.crc32(block, crc)
            size += len(block)
    return FileRecord(size, f"{crc:08x}")


def fsync_directory(path: Path) -> None:
    """Makes the names in a directory durable (a file's own fsync does not cover its name)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text_atomic(path: Path, text: str) -> None:
    """Replaces a small file in one step: readers see the old text or the new one, never a part.

    Raises:
        OSError: The disk is full or not writable; the old file is then untouched.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_directory(path.parent)


def write_json(path: Path, value: object) -> FileRecord:
    """Writes indented JSON, flushed to the disk, and returns its record."""
    with ChecksummedFile(path) as file:
        file.write((json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())
    return file.record


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape and type of a tensor before its values are there."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_elements(self) -> int:
        """Number of elements, 1 for shape ()."""
        return int(torch.Size(self.shape).numel())

    @property
    def size_bytes(self) -> int:
        """Bytes of the values."""
        return self.num_elements * self.dtype.itemsize


class SafetensorsWriter(ChecksummedFile):
    """Writes one .safetensors file tensor by tensor, so that never more than one tensor is in memory for it.

    The format (header length as u64 little-endian, JSON header, values) is the one of huggingface/safetensors.
    """

    def __init__(self, path: Path, specs: Sequence[TensorSpec], metadata: Mapping[str, str] | None = None) -> None:
        super().__init__(path)
        self._pending = list(reversed(specs))
        header: dict[str, object] = {"__metadata__": dict(metadata or {"format": "pt"})}
        offset = 0
        for spec in specs:
            end = offset + spec.size_bytes
            header[spec.name] = {
                "dtype": SAFETENSORS_DTYPES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [offset, end],
            }
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # values start at a multiple of 8, as readers that map the file expect
        self.write(len(text).to_bytes(8, "little") + text)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Writes the next tensor; the order is that of the specs. Its shape may be a reshape of the spec's."""
        spec = self._pending.pop()
        assert spec.name == name and spec.num_elements == tensor.numel() and spec.dtype == tensor.dtype, (spec, name)
        values = tensor.detach().contiguous().cpu().reshape(-1)
        if values.numel():
            self.write(values.view(torch.uint8).numpy().data)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        assert kind is not None or not self._pending, f"tensors promised but not written: {self._pending}"


def save_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> FileRecord:
    """Writes a .safetensors file of tensors that are all at hand and returns its record."""
    specs = [TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
    with SafetensorsWriter(path, specs, metadata) as file:
        for name, tensor in tensors.items():
            file.add(name, tensor)
    return file.record


def split_into_files(specs: Iterable[TensorSpec], max_file_bytes: int) -> list[list[TensorSpec]]:
    """Cuts a sequence of tensors into files of at most max_file_bytes (a larger tensor gets a file of its own)."""
    files: list[list[TensorSpec]] = []
    room = 0
    for spec in specs:
        if not files or spec.size_bytes > room:
            files.append([])
            room = max_file_bytes
        files[-1].append(spec)
        room -= spec.size_bytes
    return files


def model_file_name(index: int, num_files: int) -> str:
    """Hugging Face's name of weight file `index` (0-based) of `num_files`."""
    return f"model-{index + 1:05d}-of-{num_files:05d}.safetensors"
