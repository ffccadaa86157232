"""What counts as out of memory, and whether the kernel says that it killed for it."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from clap_zero import oom


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
