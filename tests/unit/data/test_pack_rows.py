"""What becomes of single rows of a table."""

from __future__ import annotations

import pytest

from clap_zero.data.pack import pack
from clap_zero.errors import DataError
from tests.unit.data.packing import options, read_split, rejected, write_clips, write_rows


def test_a_row_nested_too_deeply_is_rejected(tmp_path):
    write_clips(tmp_path, ["a.wav", "b.wav", "c.wav", "d.wav"])
    for number, (name, depth) in enumerate({"a.wav": 600, "b.wav": 90, "c.wav": 60, "d.wav": 250}.items()):
        line = f'{{"file": "{name}", "caption": "x", "{"tag" if number > 2 else "y"}": {"[" * depth}{"]" * depth}}}\n'
        with (tmp_path / "m.jsonl").open("a") as file:
            file.write(line)
    report = pack(options(tmp_path, manifest=tmp_path / "m.jsonl", workers=2))
    assert report.num_pairs + report.num_rejected == 4
    assert {"file": "a.wav", "reason": "row 1: nested too deeply"} in rejected(tmp_path / "out" / "train")


def test_a_second_row_of_a_file_adds_its_tags_and_columns(tmp_path):
    write_clips(tmp_path, ["a.wav"])
    rows = [
        {"file": "a.wav", "caption": "x", "tag": ["dog"], "licence": None},
        {"file": "a.wav", "caption": "x", "tag": ["dog", "bark"], "licence": "CC0"},
        {"file": "a.wav", "caption": "x", "tag": ["bark"], "licence": "CC0", "year": 2001},
        {"file": "a.wav", "caption": "x", "tag": ["bark"], "year": 2002},
        {"file": "a.wav", "caption": "x", "tag": ["dog"], "licence": "CC0", "year": 2001},
    ]
    report = pack(options(tmp_path, manifest=write_rows(tmp_path / "m.jsonl", rows)))
    [(_, _, record)] = read_split(tmp_path / "out" / "train")
    assert (record["text"], record["tag"]) == (["x"], ["dog", "bark"])
    assert record["original_data"] == {"licence": "CC0", "year": 2001, "name": "a.wav"}
    assert (report.num_pairs, report.num_duplicates) == (1, 1)


def test_rows_are_rejected_for_few_kinds_of_reasons(tmp_path):
    write_clips(tmp_path, ["a.wav"])
    table = tmp_path / "m.csv"
    table.write_text("file,caption\n,x\n,y\nb.wav,x,y\nc.wav,x,y\na.wav,x\n")
    report = pack(options(tmp_path, manifest=table))
    comma = "has more cells than the header (quote captions that hold a comma)"
    assert report.reasons == {"names no audio": 2, comma: 2}


@pytest.mark.parametrize(
    ("data", "words"), [(b"PAR1", "--dataset"), (b"PK\x03\x04", "as CSV"), (b"\x1f\x8b", "gunzip")]
)
def test_what_is_no_table_is_named(tmp_path, data, words):
    (tmp_path / "m.csv").write_bytes(data + bytes(50))
    with pytest.raises(DataError, match=f"m.csv is .*{words}"):
        pack(options(tmp_path, manifest=tmp_path / "m.csv"))
