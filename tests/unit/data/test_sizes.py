from __future__ import annotations

import json

import pytest

from clap_zero.data.index import load_index
from clap_zero.data.sizes import parse_sizes
from clap_zero.data.tar import MAX_MEMBERS
from clap_zero.errors import DataError
from tests.unit.data.shard_files import write_split


@pytest.mark.parametrize("count", ["many", -1, True, 1.0, MAX_MEMBERS // 2 + 1, 2**40, 10**4000])
def test_a_count_that_no_tar_can_have_is_refused_by_name(count) -> None:
    text = json.dumps({"0.tar": 7, "1.tar": count})
    with pytest.raises(
        DataError, match=r"sizes.json: the count of '1.tar' must be a whole number up to 131,072"
    ) as error:
        parse_sizes("sizes.json", text)
    assert len(str(error.value)) < 200
    assert parse_sizes("sizes.json", json.dumps({"0.tar": MAX_MEMBERS // 2})) == {"0.tar": MAX_MEMBERS // 2}


def test_an_absurd_count_costs_no_memory(tmp_path) -> None:
    directory = write_split(tmp_path / "train", [4])
    (directory / "sizes.json").write_text(json.dumps({"0.tar": 2**40}))
    with pytest.raises(DataError, match="1,099,511,627,776|1099511627776"):
        load_index([str(directory)])


@pytest.mark.parametrize("name", ["../x.tar", "/etc/passwd", "a/b.tar", "", "..", "a\0b"])
def test_names_are_those_of_files_in_the_directory(tmp_path, name) -> None:
    directory = write_split(tmp_path / "train", [4])
    (directory / "sizes.json").write_text(json.dumps({"0.tar": 4, name: 1}))
    with pytest.raises(DataError, match=r"sizes\.json lists '.*': names must be plain names of files in this"):
        load_index([str(directory)])


def test_a_name_that_stands_there_twice_is_refused(tmp_path) -> None:
    directory = write_split(tmp_path / "train", [4])
    (directory / "sizes.json").write_text('{"0.tar": 3, "1.tar": 2, "0.tar": 4}')
    with pytest.raises(DataError, match=r"sizes\.json counts '0\.tar' 2 times"):
        load_index([str(directory)])
    assert parse_sizes("sizes.json", '{"a:b.tar": 3, "::.tar": 2}') == {"a:b.tar": 3, "::.tar": 2}
