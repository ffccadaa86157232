from __future__ import annotations

import json
import logging
import time

import pytest

from clap_zero.data.index import load_index
from clap_zero.data.patterns import expand_braces
from clap_zero.data.places import ReadPolicy
from clap_zero.data.shards import ShardReader
from clap_zero.errors import DataError
from tests.unit.data.shard_files import pair, write_split, write_tar


def test_split_directory(tmp_path):
    index = load_index([str(write_split(tmp_path / "root" / "train", [3, 2]))])
    assert [(s.key_prefix, s.num_samples) for s in map(index.shard, range(2))] == [
        ("train/0.tar", 3),
        ("train/1.tar", 2),
    ]
    assert index.num_samples == 5


def test_directory_without_counts_is_scanned(tmp_path):
    index = load_index([str(write_split(tmp_path / "train", [3, 2], declare=False))])
    assert index.sizes.tolist() == [3, 2]


def test_numbers_are_ordered_as_numbers(tmp_path):
    index = load_index([str(write_split(tmp_path / "train", [1] * 11))])
    assert [index.path(n).rsplit("/", 1)[-1] for n in range(index.num_shards)] == [f"{n}.tar" for n in range(11)]


def test_braces_tars_and_several_patterns(tmp_path):
    one, two = write_split(tmp_path / "a" / "train", [1, 2, 3]), write_split(tmp_path / "b" / "train", [4])
    index = load_index([f"{one}/{{0..2}}.tar", str(two)])
    assert index.sizes.tolist() == [1, 2, 3, 4]
    # Equal split names are kept apart by the directories above.
    assert index.key_prefix(0) == "a/train/0.tar" and index.key_prefix(3) == "b/train/0.tar"
    assert load_index([str(two / "0.tar")]).key_prefix(0) == "train/0.tar"


def test_expand_braces_as_bash_does():
    assert expand_braces("s-{008..011}.tar") == ["s-008.tar", "s-009.tar", "s-010.tar", "s-011.tar"]
    assert expand_braces("{9..11}") == ["9", "10", "11"]
    assert expand_braces("{2..0}") == ["2", "1", "0"]
    assert expand_braces("{a,b}/{0..1}") == ["a/0", "a/1", "b/0", "b/1"]
    assert expand_braces("plain {x}.tar") == ["plain {x}.tar"]
    with pytest.raises(DataError, match="more than"):
        expand_braces("{0..99999999999}")


def test_missing_shards_are_listed_before_anything_is_read(tmp_path):
    split = write_split(tmp_path / "train", [1] * 5)
    (split / "3.tar").unlink()
    with pytest.raises(DataError, match=r"1 of 5 shards are missing: .*/3\.tar"):
        load_index([f"{split}/{{0..4}}.tar"])
    with pytest.raises(DataError, match=r"1 of 5 shards are missing: .*/3\.tar"):
        load_index([str(split)])  # sizes.json names it
    with pytest.raises(DataError, match=r"6 of 10 shards are missing.*there are 4 tars, 0.tar to 4.tar"):
        load_index([f"{split}/{{0..9}}.tar"])


def test_padding_is_guessed(tmp_path):
    write_tar(tmp_path / "train" / "000.tar", pair("a", 1))
    with pytest.raises(DataError, match=r"padded otherwise: .*000\.tar"):
        load_index([f"{tmp_path}/train/{{0..0}}.tar"])


def test_names_with_spaces_and_braces(tmp_path):
    write_tar(tmp_path / "my data" / "it's {1,2} [x].tar", pair("a", 1))
    path = str(tmp_path / "my data" / "it's {1,2} [x].tar")
    assert load_index([path]).path(0) == path
    assert load_index([str(tmp_path / "my data")]).num_samples == 1


@pytest.mark.parametrize("pattern", ["pipe:cat x.tar", "pipe:false"])
def test_a_command_is_not_run_unless_it_is_allowed(pattern):
    with pytest.raises(DataError, match=r"pipe:.* --data.allow_pipe true"):
        load_index([pattern])


@pytest.mark.parametrize("names", [("k.input.flac", "k.outputs.txt"), ("k.flac", "k.cls")])
@pytest.mark.parametrize("declare", [True, False])
def test_nothing_usable_is_said_with_the_suffixes(tmp_path, names, declare):
    write_tar(tmp_path / "train" / "0.tar", [(name, b"x") for name in names])
    if declare:
        (tmp_path / "train" / "sizes.json").write_text('{"0.tar": 1}')
    suffixes = [name[name.index(".") :] for name in names]
    with pytest.raises(DataError, match="0 usable of") as caught:
        load_index([str(tmp_path / "train")])
    assert all(suffix in str(caught.value) for suffix in suffixes)


def test_count_of_record_is_kept_and_the_difference_said(tmp_path, caplog):
    split = write_split(tmp_path / "train", [9])
    (split / "sizes.json").write_text('{"0.tar": 10}')
    with caplog.at_level(logging.WARNING):
        assert load_index([str(split)]).num_samples == 10
    assert "has 9 pairs, sizes.json says 10" in caplog.text


def test_a_tar_that_sizes_json_does_not_list_is_said(tmp_path, caplog):
    split = write_split(tmp_path / "train", [2])
    write_tar(split / "9.tar", pair("z", 1))
    with caplog.at_level(logging.WARNING):
        assert load_index([str(split)]).num_samples == 2
    assert "does not list 1 tars" in caplog.text


@pytest.mark.parametrize("text", ["{", "[]", '{"0.tar": "2"}', '{"0.tar": -1}', '{"0.tar": true}'])
def test_broken_sizes_are_an_error_that_names_the_file(tmp_path, text):
    split = write_split(tmp_path / "train", [2])
    (split / "sizes.json").write_text(text)
    with pytest.raises(DataError, match=r"sizes\.json"):
        load_index([str(split)])


def test_the_root_instead_of_a_split_gets_a_hint(tmp_path):
    write_split(tmp_path / "root" / "train", [1])
    with pytest.raises(DataError, match=r"some in its train: give .*/root/train"):
        load_index([str(tmp_path / "root")])


def test_a_shard_given_twice_is_refused(tmp_path):
    split = write_split(tmp_path / "train", [1])
    with pytest.raises(DataError, match="named twice"):
        load_index([str(split), str(split / "0.tar")])


def test_fingerprint_is_of_names_and_counts_not_of_places(tmp_path):
    one = load_index([str(write_split(tmp_path / "x" / "train", [3, 2]))])
    same = load_index([str(write_split(tmp_path / "y" / "train", [3, 2]))])
    other = load_index([str(write_split(tmp_path / "z" / "train", [3, 1]))])
    assert one.fingerprint == same.fingerprint != other.fingerprint


def test_many_listed_shards_are_found_quickly(tmp_path):
    split = tmp_path / "train"
    write_split(split, [1])
    data = (split / "0.tar").read_bytes()
    for number in range(1, 3000):
        (split / f"{number}.tar").write_bytes(data if number % 100 == 0 else b"")
    (split / "sizes.json").write_text(json.dumps({f"{n}.tar": 1 for n in range(3000)}))
    start = time.process_time()
    assert load_index([str(split)]).num_samples == 3000
    assert time.process_time() - start < 2


def test_shards_without_counts_beyond_a_limit_are_refused(tmp_path, monkeypatch):
    split = write_split(tmp_path / "train", [1] * 5, declare=False)
    with pytest.raises(DataError, match=r"at most 4 are counted .* `clap-zero check`"):
        load_index([str(split)], max_counted=4)
    assert load_index([str(split)], max_counted=None).sizes.tolist() == [1] * 5


def test_shards_are_counted_at_the_same_time(tmp_path, monkeypatch):
    """Storage takes its time for each shard; all ranks wait for them."""
    split = write_split(tmp_path / "train", [1] * 20, declare=False)
    original = ShardReader.contents

    def slow(reader, shard):
        time.sleep(0.1)
        return original(reader, shard)

    monkeypatch.setattr(ShardReader, "contents", slow)
    began = time.monotonic()
    assert load_index([str(split)]).num_samples == 20
    assert time.monotonic() - began < 1.5


def test_some_shards_without_a_pair_do_not_end_a_run(tmp_path, caplog):
    split = write_split(tmp_path / "train", [1] * 12)
    for number in range(12):
        if number != 5:
            write_tar(split / f"{number}.tar", [(f"{number}.txt", b"x")])
    assert load_index([str(split)]).num_samples == 12
    write_tar(split / "5.tar", [("5.txt", b"x")])
    with pytest.raises(DataError, match="0 usable of 12"):
        load_index([str(split)])


def test_an_unreadable_shard_is_passed_over_where_that_is_allowed(tmp_path, caplog):
    split = write_split(tmp_path / "train", [2, 2])
    (split / "1.tar").unlink()
    (split / "1.tar").mkdir()
    with pytest.raises(DataError, match=r"1\.tar"):
        load_index([str(split)])
    assert load_index([str(split)], policy=ReadPolicy(missing="skip")).num_samples == 4
    assert "1.tar" in caplog.text and "left out" in caplog.text
