"""What a pattern stands for here and at a URL, and what is said when something is missing."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest

from clap_zero.data.find import find_shards
from clap_zero.data.index import load_index
from clap_zero.data.places import ReadPolicy
from clap_zero.errors import DataError
from tests.unit.data.shard_files import pair, write_split, write_tar
from tests.unit.data.span_files import write_spans
from tests.unit.data.web import served


@pytest.fixture
def policy(tmp_path):
    return ReadPolicy(cache_dir=str(tmp_path / "cache"), timeout_s=5, retries=0)


def skipping(policy: ReadPolicy) -> ReadPolicy:
    return ReadPolicy(cache_dir=policy.cache_dir, timeout_s=5, retries=0, missing="skip")


def test_a_remote_split_is_its_sizes_file(tmp_path, policy):
    write_split(tmp_path / "root" / "train", [3, 2] + [1] * 30)
    local = load_index([str(tmp_path / "root" / "train")])
    with served(tmp_path / "root") as (url, asked):
        index = load_index([f"{url}/train"], policy=policy)
    assert index.sizes.tolist() == [3, 2] + [1] * 30
    assert index.path(1) == f"{url}/train/1.tar" and index.key_prefix(1) == "train/1.tar"
    assert index.fingerprint == local.fingerprint, "the same data, wherever it lies"
    assert index.shard(0).spans is None
    assert sum(count for (_, path), count in asked.items() if path.endswith(".tar")) <= 8, "only some are asked for"


@pytest.mark.parametrize("remote", [False, True])
def test_spans_rows_are_those_of_the_whole_split(tmp_path, policy, remote):
    split = write_split(tmp_path / "root" / "train", [3, 2, 4, 1])
    write_spans(split)
    with served(tmp_path / "root") as (url, _):
        place = f"{url}/train" if remote else str(split)
        whole = load_index([place], policy=policy)
        some = load_index([f"{place}/{{1..2}}.tar"], policy=policy)
    assert [whole.shard(n).spans.first_row for n in range(4)] == [0, 3, 5, 9]
    assert [some.shard(n).spans.first_row for n in range(2)] == [3, 5]
    assert some.shard(0).spans.path == f"{place}/spans.npy"


def test_remote_tars_take_their_counts_from_the_sizes_file_beside_them(tmp_path, policy):
    write_split(tmp_path / "train", [3, 2, 4])
    with served(tmp_path) as (url, asked):
        index = load_index([f"{url}/train/{{0..1}}.tar", f"{url}/train/2.tar?signature=secret"], policy=policy)
        assert index.sizes.tolist() == [3, 2, 4]
        assert not any(path.startswith("/train/0.tar") for _, path in asked), "none is read or asked for"
        assert index.path(2) == f"{url}/train/2.tar?signature=secret"
        assert index.key_prefix(2) == "train/2.tar", "keys hold no secrets"
        with pytest.raises(DataError, match="named twice") as caught:
            load_index([f"{url}/train/2.tar?signature=secret", f"{url}/train/2.tar?signature=other"], policy=policy)
    assert "secret" not in str(caught.value)


def test_remote_tars_without_counts_are_counted_with_a_warning(tmp_path, policy, caplog):
    write_split(tmp_path / "train", [3, 2], declare=False)
    with served(tmp_path) as (url, _), caplog.at_level(logging.WARNING):
        index = load_index([f"{url}/train/{{0..1}}.tar"], policy=policy)
    assert index.sizes.tolist() == [3, 2]
    assert "downloaded now" in caplog.text and "clap-zero check" in caplog.text


def test_a_remote_directory_without_sizes_file_says_the_ways_out(tmp_path, policy):
    (tmp_path / "train").mkdir()
    with served(tmp_path) as (url, _), pytest.raises(DataError, match=r"no sizes\.json.*\{000\.\.127\}\.tar"):
        load_index([f"{url}/train"], policy=policy)


def test_missing_remote_shards_stop_or_are_left_out(tmp_path, policy, caplog):
    split = write_split(tmp_path / "train", [1, 2, 3, 4])
    (split / "sizes.json").write_text(json.dumps({f"{n}.tar": n + 1 for n in (0, 1, 2)}))
    with served(tmp_path) as (url, _):
        # 3 is there without a count, 4 and 5 are not there.
        pattern = f"{url}/train/{{1..5}}.tar"
        with pytest.raises(DataError, match=r"2 of 5 shards are missing: .*/4\.tar.*missing_shards skip"):
            load_index([pattern], policy=policy)
        with caplog.at_level(logging.WARNING):
            index = load_index([pattern], policy=skipping(policy))
    assert index.sizes.tolist() == [2, 3, 4]
    assert "2 of 5 shards are missing" in caplog.text and "left out" in caplog.text


def test_a_shard_that_a_remote_sizes_file_lists_but_nobody_has(tmp_path, policy, caplog):
    split = write_split(tmp_path / "train", [1, 2, 3])
    (split / "1.tar").unlink()
    with served(tmp_path) as (url, _):
        with pytest.raises(DataError, match=r"1 of 3 shards are missing: .*/train/1\.tar"):
            load_index([f"{url}/train"], policy=policy)
        with caplog.at_level(logging.WARNING):
            assert load_index([f"{url}/train"], policy=skipping(policy)).sizes.tolist() == [1, 3]


def test_missing_local_shards_are_left_out_where_that_is_allowed(tmp_path, caplog):
    split = write_split(tmp_path / "train", [1, 2, 3, 4])
    write_spans(split)
    (split / "1.tar").unlink()
    skip = ReadPolicy(missing="skip")
    with caplog.at_level(logging.WARNING):
        for pattern in (str(split), f"{split}/{{0..9}}.tar"):
            index = load_index([pattern], policy=skip)
            assert index.sizes.tolist() == [1, 3, 4]
            assert [index.shard(n).spans.first_row for n in range(3)] == [0, 3, 6], "rows stay those of the file"
    assert "1 of 4 shards are missing" in caplog.text and "7 of 10 shards are missing" in caplog.text
    with pytest.raises(DataError, match="0 usable"):
        load_index([f"{tmp_path}/nowhere/{{0..9}}.tar"], policy=skip)


def test_a_host_that_is_not_there_is_one_line(policy):
    with pytest.raises(DataError, match=r"127\.0\.0\.1:9") as caught:
        load_index(["http://127.0.0.1:9/train/{0..3}.tar"], policy=policy)
    assert "\n" not in str(caught.value)


def test_pipes_are_counted_when_they_are_allowed(tmp_path, policy):
    write_split(tmp_path / "train", [3, 2], declare=False)
    allowed = ReadPolicy(cache_dir=policy.cache_dir, timeout_s=5, retries=0, allow_pipe=True)
    index = load_index([f"pipe:cat {tmp_path}/train/{{0..1}}.tar"], policy=allowed)
    assert index.sizes.tolist() == [3, 2]
    assert index.key_prefix(0) == "train/0.tar"


def test_a_command_that_fails_is_named_or_left_out(tmp_path, policy, caplog):
    write_split(tmp_path / "train", [3], declare=False)
    patterns = ["pipe:false", f"{tmp_path}/train/0.tar"]
    with pytest.raises(DataError, match="pipe:false"):
        load_index(patterns, policy=ReadPolicy(cache_dir=policy.cache_dir, retries=0, allow_pipe=True))
    both = ReadPolicy(cache_dir=policy.cache_dir, retries=0, allow_pipe=True, missing="skip")
    with caplog.at_level(logging.WARNING):
        index = load_index(patterns, policy=both)
    assert index.sizes.tolist() == [3] and "pipe:false" in caplog.text
    assert [one.num_samples for one in index.sets] == [0, 3]
    shards, _ = index.order(seed=0, epoch=0).locate(np.arange(3))
    assert [index.shard(int(n)).set_id for n in shards] == [1, 1, 1]


def test_names_that_mean_something_in_urls(tmp_path, policy):
    for name in ("a b.tar", "50%25 #1?.tar"):
        write_tar(tmp_path / "train" / name, pair("k", 1))
    (tmp_path / "train" / "sizes.json").write_text(json.dumps({"a b.tar": 1, "50%25 #1?.tar": 1}))
    with served(tmp_path) as (url, _):
        index = load_index([f"{url}/train"], policy=policy)
    assert sorted(index.path(n).rsplit("/", 1)[1] for n in range(2)) == ["50%2525 %231%3F.tar", "a b.tar"]


def test_a_remote_sizes_file_cannot_name_what_lies_elsewhere(tmp_path, policy):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "sizes.json").write_text(json.dumps({"../../secret.tar": 1}))
    with served(tmp_path) as (url, _), pytest.raises(DataError, match="plain names of files"):
        load_index([f"{url}/train"], policy=policy)


def test_a_star_is_not_expanded_at_urls(policy):
    with pytest.raises(DataError, match=r"'\*' is not expanded.*\{000\.\.127\}"):
        find_shards("s3://bucket/train/*.tar", policy)


def test_commands_that_are_shown_alike_are_told_apart(tmp_path, policy):
    for host in "ab":
        write_split(tmp_path / host, [2], declare=False)
    allowed = ReadPolicy(cache_dir=policy.cache_dir, timeout_s=5, retries=0, allow_pipe=True)
    commands = [f"pipe:tar -C {tmp_path}/{host} -cf - --transform s,./,, s.d" for host in "ab"]
    for host in "ab":
        (tmp_path / host / "s.d").mkdir()
        for name, data in pair(host, 1):
            (tmp_path / host / "s.d" / name).write_bytes(data)
    index = load_index(commands, policy=allowed)
    assert len({index.key_prefix(number) for number in range(2)}) == 2
    with pytest.raises(DataError, match="named twice"):
        load_index([commands[0], commands[0]], policy=allowed)


def test_a_list_in_braces_may_be_longer_than_a_name(tmp_path):
    split = write_split(tmp_path / "train", [1] * 3)
    pattern = "{" + ",".join(f"{n:060}" for n in range(9)) + ",0,1,2}.tar"
    with pytest.raises(DataError, match="9 of 12 shards are missing"):
        load_index([f"{split}/{pattern}"])
    assert load_index([f"{split}/{pattern}"], policy=ReadPolicy(missing="skip")).num_shards == 3
    with pytest.raises(DataError, match="is not there"):
        load_index(["x" * 300])


def test_a_home_that_nobody_knows_is_said(tmp_path):
    with pytest.raises(DataError, match="no such home directory is known"):
        load_index(["~nobody-here/train"])


def test_a_directory_under_two_names_is_named_twice(tmp_path):
    split = write_split(tmp_path / "train", [1, 1])
    (tmp_path / "other").symlink_to(split)
    with pytest.raises(DataError, match=r"0\.tar is named twice"):
        load_index([str(split), str(tmp_path / "other")])


def test_why_nothing_is_usable_is_in_the_message(tmp_path):
    split = write_split(tmp_path / "train", [1])
    (split / "sizes.json").write_text('\ufeff{"0.tar": 0}')
    with pytest.raises(DataError, match=r"its sizes\.json counts no pair"):
        load_index([str(split)])
    for declared in (True, False):
        (split / "0.tar").write_bytes(b"BZh9" + bytes(5_000))
        (split / "sizes.json").write_text('{"0.tar": 1}')
        if not declared:
            (split / "sizes.json").unlink()
        with pytest.raises(DataError, match=r"0 usable of 0 samples.*0\.tar: is compressed.*unpack it with bunzip2"):
            load_index([str(split)])
