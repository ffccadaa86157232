"""Files that can be told from torn ones."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from clap_zero.checkpoint.buffers import persistent_buffers
from clap_zero.checkpoint.files import (
    FileRecord,
    SafetensorsWriter,
    TensorSpec,
    checksum_file,
    save_tensors,
    split_into_files,
    write_json,
    write_text_atomic,
)


def test_safetensors_of_every_type_and_shape_read_back_by_the_library(tmp_path: Path) -> None:
    tensors = {
        "scalar": torch.tensor(1.5),
        "matrix": torch.randn(3, 5).T,
        "half": torch.randn(7).half(),
        "brain": torch.randn(2, 2).bfloat16(),
        "count": torch.tensor(3),
        "flags": torch.tensor([True, False]),
        "empty": torch.empty(0, 4),
        "state": torch.get_rng_state(),
    }
    record = save_tensors(tmp_path / "x.safetensors", tensors)
    assert record == checksum_file(tmp_path / "x.safetensors")
    loaded = load_file(tmp_path / "x.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype and torch.equal(loaded[name], tensor), name


def test_a_promised_tensor_must_come(tmp_path: Path) -> None:
    specs = [TensorSpec("a", (2,), torch.float32), TensorSpec("b", (2,), torch.float32)]
    with pytest.raises(AssertionError, match="not written"), SafetensorsWriter(tmp_path / "x", specs) as file:
        file.add("a", torch.zeros(2))
    with pytest.raises(AssertionError), SafetensorsWriter(tmp_path / "y", specs) as file:
        file.add("b", torch.zeros(2))


def test_records_are_crc32_and_size(tmp_path: Path) -> None:
    record = write_json(tmp_path / "x.json", {"ü": 1})
    data = (tmp_path / "x.json").read_bytes()
    assert record == FileRecord(len(data), f"{zlib.crc32(data):08x}")


def test_text_is_replaced_in_one_step_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "latest"
    write_text_atomic(path, "one")
    write_text_atomic(path, "two")
    assert path.read_text() == "two" and [p.name for p in tmp_path.iterdir()] == ["latest"]
    (tmp_path / "directory").mkdir()
    with pytest.raises(OSError):
        write_text_atomic(tmp_path / "directory", "x")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["directory", "latest"]


def test_tensors_are_cut_into_files_in_order() -> None:
    specs = [TensorSpec(str(size), (size,), torch.uint8) for size in (4, 4, 3, 50, 1, 10)]
    files = split_into_files(specs, 10)
    assert [[spec.num_elements for spec in file] for file in files] == [[4, 4], [3], [50], [1], [10]]


def test_only_buffers_of_a_state_dict_are_kept() -> None:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(2)
            self.register_buffer("here", torch.zeros(1))
            self.register_buffer("scratch", torch.zeros(1), persistent=False)
            self.register_buffer("nothing", None)

    module = nn.Sequential(Module(), Module())
    parameters = dict(module.named_parameters())
    assert list(persistent_buffers(module)) == [name for name in module.state_dict() if name not in parameters] or (
        sorted(persistent_buffers(module)) == sorted(name for name in module.state_dict() if name not in parameters)
    )
