"""What counts as out of memory, and whether the kernel says that it killed for it."""

from __future__ import annotations

import errno
import re
from pathlib import Path

import pytest

from clap_zero import oom
from clap_zero.config.ds_json import load_ds_json
from clap_zero.config.values import parse_value


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("shapes differ"),
        RuntimeError("could not create a primitive descriptor for a convolution"),
        OSError(28, "No space left on device"),
        KeyError("a"),
    ],
)
def test_other_errors_are_not_out_of_memory(error: Exception) -> None:
    assert not oom.is_out_of_memory(error)


def test_memory_that_python_cannot_have_is() -> None:
    with pytest.raises(MemoryError) as caught:
        bytearray(1 << 60)
    assert oom.is_out_of_memory(caught.value)


def test_buffers_that_onednn_cannot_have_are() -> None:
    assert oom.is_out_of_memory(RuntimeError("could not create a primitive"))


def test_a_mapping_that_the_kernel_refuses_is() -> None:
    assert oom.is_out_of_memory(OSError(errno.ENOMEM, "Cannot allocate memory"))
    assert not oom.is_out_of_memory(OSError(errno.ENOSPC, "No space left on device"))


def test_the_kernel_counts_its_kills() -> None:
    kills = oom.kernel_kills()
    assert isinstance(kills, int) and kills >= 0


def test_the_count_is_read_from_its_own_line(tmp_path: Path) -> None:
    path = tmp_path / "memory.events"
    path.write_text("low 0\nhigh 3\noom 5\noom_kill 4\noom_group_kill 1\n")
    assert oom._counted(path) == 4


def test_the_switches_that_it_names_are_there(tmp_path: Path) -> None:
    line = oom.describe(MemoryError(), phase="backward")
    flags = re.findall(r"--ds\.(\S+) (N|3|cpu|'\{\}')", line)
    assert [name for name, _ in flags] == [
        "train_micro_batch_size_per_gpu",
        "activation_checkpointing",
        "zero_optimization.stage",
        "zero_optimization.offload_optimizer.device",
    ]
    path = tmp_path / "ds.json"
    path.write_text("{}")
    overrides = {name: parse_value(text.strip("'").replace("N", "4")) for name, text in flags}
    checked = load_ds_json(str(path), overrides)
    assert checked["activation_checkpointing"] == {} and checked["zero_optimization"]["stage"] == 3
