"""Random access to the samples of a shard."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from clap_zero.data.members import BadSampleError
from clap_zero.data.shards import Shard, ShardReader
from clap_zero.data.spans import SPANS_FILE, SpansRef, save_spans
from tests.unit.data.shard_files import pair, write_tar
from tests.unit.data.span_files import span_rows


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


@pytest.mark.parametrize("how", ["evicted", "stale", "in place"])
def test_a_replaced_file_is_not_read_with_the_old_places(shard, monkeypatch, how):
    """As a writer does that puts a new shard in the place of the old one while a run reads it."""
    reader = ShardReader()
    assert reader.read(shard, 0).key == "a"
    new = write_tar(Path(shard.path).with_name("new"), pair("long name", 7, seconds=0.2) + pair("d", 8))
    if how == "in place":
        Path(shard.path).write_bytes(new.read_bytes())
    else:
        new.replace(shard.path)
    if how == "evicted":
        monkeypatch.setattr("clap_zero.data.shards._OPEN_FILES", 1)
        other = write_tar(Path(shard.path).with_name("1.tar"), pair("c", 3))
        assert reader.read(Shard(str(other), "train/1.tar", 1), 0).key == "c"
    elif how == "stale":
        original, failing = os.pread, [True]

        def pread(*arguments):
            if failing:
                failing.clear()
                raise OSError(errno.ESTALE, "Stale file handle")
            return original(*arguments)

        monkeypatch.setattr(os, "pread", pread)
    raw = reader.read(shard, 1)
    members = dict(pair("d", 8))
    assert (raw.key, raw.audio, raw.texts) == ("d", members["d.flac"], {".json": members["d.json"]})
    assert reader.key(shard, 0) == "long name"
    reader.close()


@pytest.mark.parametrize("spans", [False, True])
def test_reads_that_give_less_than_was_asked_for_are_no_damage(shard, tmp_path, monkeypatch, spans):
    a = pair("a", 1)
    write_tar(Path(shard.path), [*a, a[0], *pair("b", 2)])  # a copy has to be compared
    save_spans(tmp_path / SPANS_FILE, span_rows(shard.path))
    if spans:
        shard = replace(shard, spans=SpansRef(str(tmp_path / SPANS_FILE), 0, 2))
    original = os.pread
    monkeypatch.setattr(os, "pread", lambda descriptor, size, offset: original(descriptor, min(size, 700), offset))
    reader = ShardReader()
    assert [reader.read(shard, number).audio for number in (0, 1)] == [a[0][1], pair("b", 2)[0][1]]
    assert [note for note in reader.take_notes() if "doubled" not in note] == []
    reader.close()


@pytest.mark.parametrize("times", [1, 9])
def test_a_sample_is_not_made_of_two_versions_of_a_shard(shard, monkeypatch, times):
    """The shard is written anew in place, with equal layout, between the reads of its sound and its text."""
    path, original, left = Path(shard.path), os.pread, [times]
    new = write_tar(
        path.with_name("new"), [("a.flac", pair("a", 1)[0][1]), ("a.json", b'{"text": "another"}')]
    ).read_bytes()
    sound = pair("a", 1)[0][1]

    def pread(descriptor, size, offset):
        data = original(descriptor, size, offset)
        if data == sound and left[0]:
            left[0] -= 1
            path.write_bytes(new + bytes(512 * left[0]))
        return data

    monkeypatch.setattr(os, "pread", pread)
    reader = ShardReader()
    if times == 1:
        assert reader.read(shard, 0).texts[".json"] == b'{"text": "another"}'
    else:
        with pytest.raises(BadSampleError, match="written anew meanwhile"):
            reader.read(shard, 0)
    reader.close()
