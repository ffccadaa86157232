"""Named pipes, devices and directories in the places of files: they are named, nothing waits for them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from clap_zero.data.blacklist import Blacklist
from clap_zero.data.check import CheckOptions, check
from clap_zero.data.index import load_index
from clap_zero.data.members import BadSampleError
from clap_zero.data.places import ReadPolicy
from clap_zero.data.regular import open_regular, read_text
from clap_zero.data.shards import ShardReader
from clap_zero.data.spans import SPANS_FILE
from clap_zero.errors import DataError
from tests.unit.data.shard_files import write_split

pytestmark = pytest.mark.timeout(60)  # an opening that waits would wait for ever


def instead(path: Path) -> Path:
    """A named pipe in the place of a file."""
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    return path


def test_what_is_no_file_is_named(tmp_path):
    places = {
        str(instead(tmp_path / "pipe")): "is a named pipe, not a file",
        str(tmp_path): "is a directory, not a file",
        "/dev/zero": "is a device, not a file",
    }
    for path, words in places.items():
        with pytest.raises(OSError, match=words):
            open_regular(path)
        with pytest.raises(OSError, match=words):
            read_text(path)


def test_shards_that_are_pipes_do_not_hang(tmp_path):
    split = write_split(tmp_path / "train", [3, 3])
    index = load_index([str(split)])
    instead(split / "1.tar")
    reader = ShardReader()
    with pytest.raises(BadSampleError, match="the shard cannot be read: is a named pipe, not a file"):
        reader.read(index.shard(1), 0)
    assert reader.read(index.shard(0), 0).key
    reader.close()
    (split / "sizes.json").unlink()
    with pytest.raises(DataError, match=r"1\.tar: the shard cannot be read: is a named pipe"):
        load_index([str(split)])
    assert load_index([str(split)], policy=ReadPolicy(missing="skip")).num_shards == 1


def test_lists_that_are_pipes_do_not_hang(tmp_path):
    split = write_split(tmp_path / "train", [3])
    instead(split / "sizes.json")
    with pytest.raises(DataError, match=r"sizes\.json cannot be read: is a named pipe, not a file; remove it"):
        load_index([str(split)])
    with pytest.raises(DataError, match=r"data\.blacklist: .*names\.txt cannot be read: is a named pipe"):
        Blacklist.read([str(instead(tmp_path / "names.txt"))])


def test_byte_ranges_that_are_a_pipe_are_not_used(tmp_path):
    split = write_split(tmp_path / "train", [3])
    instead(split / SPANS_FILE)
    shard = load_index([str(split)]).shard(0)
    assert shard.spans is not None
    reader = ShardReader()
    assert reader.read(shard, 1).key == "s0001"
    assert "is a named pipe, not a file" in reader.take_notes()[0]
    reader.close()


def test_check_says_it(tmp_path, capsys):
    split = write_split(tmp_path / "train", [3, 3])
    instead(split / "1.tar")
    report = check(CheckOptions((str(split),), progress=False))
    assert report.num_good == 3
    assert report.reasons["the shard cannot be read"] == 3
    assert "is a named pipe, not a file" in capsys.readouterr().out
