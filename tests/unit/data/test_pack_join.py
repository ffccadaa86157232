"""Joins of splits whose names look like those of a join's own files."""

from __future__ import annotations

import shutil

import pytest

from clap_zero.data import pack_join
from clap_zero.data.pack import pack
from clap_zero.data.pack_join import join
from clap_zero.data.pack_keys import Part
from clap_zero.data.pack_sources import Columns
from clap_zero.errors import DataError
from tests.unit.data.packing import options, read_split, write_clips, write_rows

SPLITS = ["a", "a.ready", "a.old", "plan.json", "made", "part.json"]


@pytest.fixture
def manifest(tmp_path):
    """A clip for each split; the last name is the record's of a part, and is refused."""
    write_clips(tmp_path / "in", [f"{number}.wav" for number in range(len(SPLITS))])
    rows = [{"file": f"{n}.wav", "caption": name, "split": name} for n, name in enumerate(SPLITS)]
    return write_rows(tmp_path / "in" / "m.csv", rows)


def pack_parts(tmp_path, manifest):
    for number in (1, 2):
        pack(options(tmp_path, manifest=manifest, part=Part(number, 2), shard_size=1, columns=Columns(split="split")))


def test_no_name_of_a_split_is_taken_for_a_file_of_the_join(tmp_path, manifest):
    for _ in range(2):  # the second replaces the first
        pack_parts(tmp_path, manifest)
        report = join(tmp_path / "out", overwrite=True)
        assert (report.num_pairs, report.num_rejected) == (5, 1)
        assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(SPLITS[:5])
        assert [read_split(tmp_path / "out" / name)[0][2]["text"] for name in SPLITS[:5]] == [[n] for n in SPLITS[:5]]


def test_parts_stay_when_a_split_did_not_come_into_its_place(tmp_path, manifest, monkeypatch):
    pack_parts(tmp_path, manifest)
    original = pack_join._publish

    def lost(out, work, name):
        original(out, work, name)
        if name == "a.old":
            shutil.rmtree(out / name)

    monkeypatch.setattr(pack_join, "_publish", lost)
    with pytest.raises(DataError, match=r"a\.old is not there after the join"):
        join(tmp_path / "out")
    assert (tmp_path / "out" / ".parts" / "2-of-2" / "part.json").is_file()
