"""Random access to the samples of a shard."""

from __future__ import annotations

import errno
import os

import pytest

from clap_zero.data.shards import BadSampleError, Shard, ShardReader
from tests.unit.data.shard_files import pair, write_tar


@pytest.fixture
def shard(tmp_path) -> Shard:
    path = write_tar(tmp_path / "0.tar", pair("a", 1) + pair("b", 2))
    return Shard(str(path), "train/0.tar", 2)


def test_a_stale_descriptor_is_opened_anew(shard, monkeypatch):
    reader = ShardReader()
    first = reader.read(shard, 0)
    stale, original = reader._files[shard.path], os.pread

    def pread(descriptor, *rest):
        if descriptor in failing:
            raise OSError(errno.ESTALE, "Stale file handle")
        return original(descriptor, *rest)

    failing = {stale}
    monkeypatch.setattr(os, "pread", pread)
    # The number of the descriptor may come back: what matters is that the file was opened again.
    opened, original_open = [], os.open

    def reopen(*arguments):
        failing.clear()
        opened.append(arguments[0])
        return original_open(*arguments)

    monkeypatch.setattr(os, "open", reopen)
    assert reader.read(shard, 0) == first
    assert opened == [shard.path]
    reader.close()


def test_what_fails_twice_is_a_bad_sample(shard, monkeypatch):
    reader = ShardReader()

    def pread(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pread", pread)
    with pytest.raises(BadSampleError, match="cannot be read: Input/output error"):
        reader.read(shard, 0)
    assert not reader._files
    monkeypatch.undo()
    assert reader.read(shard, 1).key == "b"
    reader.close()
