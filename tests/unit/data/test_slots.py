"""What is said when no sample can be found for a slot, and when that is not so yet."""

from __future__ import annotations

import pytest

from clap_zero.data.index import load_index
from clap_zero.data.members import scan_shard
from clap_zero.data.pipeline import build_pipeline
from clap_zero.data.spans import SPANS_FILE, contents_rows, save_spans
from clap_zero.errors import DataError
from tests.unit.data.shard_files import write_split, write_tar
from tests.unit.data.taking import keys_of, plan, take


def test_the_reasons_are_those_of_the_slot(tmp_path):
    """No slot finds a sample in the end; what earlier slots met is not counted for it."""
    members = [m for n in range(2) for m in ((f"b{n}.flac", b"junk"), (f"b{n}.txt", b"x"))]
    write_tar(tmp_path / "train" / "0.tar", members)
    pipeline = build_pipeline(load_index([str(tmp_path / "train")]), plan(), training=True)
    source = pipeline.pipeline[0]
    for slot in range(2):
        sample = {"work": None, "slot": slot, "position": 0, "valid": True, "attempt": 0, "faults": (), "__key__": "k"}
        with pytest.raises(DataError, match=r"64 samples tried in a row, .*: reason \(64\)$"):
            while True:
                source.retry({**sample, "fault": "reason"})
                sample = {**sample, **source._again.popleft()}


@pytest.mark.parametrize("workers", [0, 2])
def test_all_samples_bad_ends_in_bounded_time(tmp_path, workers):
    members = [m for n in range(8) for m in ((f"b{n}.flac", b"junk"), (f"b{n}.txt", b"x"))]
    write_tar(tmp_path / "train" / "0.tar", members)
    index = load_index([str(tmp_path / "train")])
    with pytest.raises(DataError, match=r"0 usable of 64 samples tried.*suffixes seen: \.flac \(8\)"):
        take(index, 1, workers=workers)


def test_a_blacklist_of_nearly_everything_leaves_the_rest(tmp_path):
    index = load_index([str(write_split(tmp_path / "train", [50, 50, 50]))])
    names = tmp_path / "names.txt"
    names.write_text("\n".join(f"s{n:04d}" for n in range(149)))
    assert set(keys_of(take(index, 2, micro_batch=2, blacklist=(str(names),)))) == {"train/2.tar::s0149"}
    names.write_text("\n".join(f"s{n:04d}" for n in range(150)))
    with pytest.raises(DataError, match=r"data.blacklist names 4096 of 4096 samples .* is .*names\.txt the list") as it:
        take(index, 1, blacklist=(str(names),))
    assert "suffixes" not in str(it.value) and "unusable" not in str(it.value)


def test_suffixes_are_told_only_where_they_were_seen(tmp_path):
    members = [m for n in range(8) for m in ((f"b{n}.flac", b"junk"), (f"b{n}.txt", b"x"))]
    write_tar(tmp_path / "train" / "0.tar", members)
    (tmp_path / "train" / "sizes.json").write_text('{"0.tar": 8}')
    save_spans(tmp_path / "train" / SPANS_FILE, contents_rows(scan_shard(str(tmp_path / "train" / "0.tar"))))
    with pytest.raises(DataError, match="0 usable of 64 samples tried") as caught:
        take(load_index([str(tmp_path / "train")]), 1)
    assert "suffixes" not in str(caught.value)


def test_reasons_of_one_kind_are_one_and_a_source_that_is_down_is_asked_about(tmp_path):
    index = load_index([str(write_split(tmp_path / "train", [8]))])
    source = build_pipeline(index, plan(), training=True).pipeline[0]
    sample = {"work": None, "slot": 0, "position": 0, "valid": True, "attempt": 0, "faults": (), "__key__": "k"}
    with pytest.raises(DataError, match=r"k: the shard cannot be had: stalled: 64 \(64\); is their source down\?"):
        for number in range(1, 65):
            source.retry({**sample, "fault": f"the shard cannot be had: stalled: {number}"})
            sample = {**sample, **source._again.popleft()}
