from __future__ import annotations

import hashlib
import json
import re

import pytest

from clap_zero.data.blacklist import Blacklist
from clap_zero.errors import DataError

AUDIO = b"some audio"
YOUTUBE = "-1_cCGK4M_4"


def has(names: list[str], key: str = "train/0.tar::a/b", record: object = None) -> bool:
    texts = {} if record is None else {".json": json.dumps(record).encode()}
    return Blacklist(names).has(key, audio=AUDIO, texts=texts)


@pytest.mark.parametrize("name", ["train/0.tar::a/b", "a/b", "b"])
def test_a_key_may_be_named_whole_or_by_its_end(name):
    assert has([name]) and has(["x", name, "y"])


@pytest.mark.parametrize("key", ["train/0.tar::a/b", "shards/train/0.tar::a/b", "s3/x/shards/train/0.tar::a/b"])
def test_a_key_is_compared_from_the_end_of_its_shard_part(key):
    assert has(["train/0.tar::a/b"], key) and has(["0.tar::a/b"], key)


@pytest.mark.parametrize(
    "name", ["a", "ain/0.tar::a/b", "x/train/0.tar::a/b", "train/0.tar::b", "B", "train/0.tar", "", "a/b.flac"]
)
def test_other_parts_of_a_key_are_no_names(name):
    assert not has([name])


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("t/0.tar::12345__somebody__dog-barking", "12345"),
        ("t/0.tar::freesound_12345", "12345"),
        ("t/0.tar::Freesound-12345", "12345"),
        (f"t/0.tar::{YOUTUBE}", YOUTUBE),
        (f"t/0.tar::Y{YOUTUBE}", YOUTUBE),
        (f"t/0.tar::{YOUTUBE}_30.000", YOUTUBE),
        (f"t/0.tar::x/Y{YOUTUBE}_30_40", YOUTUBE),
    ],
)
def test_ids_in_names(key, name):
    assert has([name], key) and not has(["99999", "other_idxxx"], key)


@pytest.mark.parametrize(
    "record",
    [
        {"id": 12345}, {"id": " 12345 "}, {"original_data": {"id": 12345, "title": "x"}}, {"freesound_id": "12345"},
        {"original_data": {"youtube_id": "12345"}}, {"ytid": "12345"}, {"video_id": "12345"}, {"sound_id": 12345},
    ],
)  # fmt: skip
def test_ids_in_the_json(record):
    assert has(["12345"], record=record) and not has(["2345"], record=record)


@pytest.mark.parametrize("record", [[], "x", {"original_data": ["12345"]}, {"title": "12345"}, None, {"id": None}])
def test_json_without_an_id_is_no_match_and_no_error(record):
    assert not has(["12345"], record=record)


def test_content_is_named_by_its_hash():
    mark = "sha256:" + hashlib.sha256(AUDIO).hexdigest()
    assert has([mark]) and has([mark.upper()]) and not has(["sha256:" + "0" * 64])


def test_files_are_joined_and_broken_ones_are_named(tmp_path):
    first, second = tmp_path / "a.txt", tmp_path / "b.txt"
    first.write_text("\ufeff# evaluation set\n\n12345\n  naïve 音  \r\n", "utf-8")
    second.write_text("b\n12345\n")
    names = Blacklist.read([str(first), str(second)])
    assert len(names) == 3 and names.has("t/0.tar::naïve 音", audio=b"", texts={})
    assert len(Blacklist.read([])) == 0
    second.write_text("ok\nsha256:12\n")
    with pytest.raises(DataError, match=re.escape(f"{second}, line 2")):
        Blacklist.read([str(second)])
    with pytest.raises(DataError, match=r"data\.blacklist: .*nowhere cannot be read"):
        Blacklist.read([str(tmp_path / "nowhere")])


def test_a_million_names_are_small_and_found():
    names = Blacklist([str(number) for number in range(100_000)])
    assert names._names.nbytes == 800_000
    assert names.has("t/0.tar::99999", audio=b"", texts={}) and not names.has("t/0.tar::100000", audio=b"", texts={})


@pytest.mark.parametrize(
    ("line", "key"),
    [
        (f"https://www.youtube.com/watch?v={YOUTUBE}", f"t/0.tar::Y{YOUTUBE}_30_40"),
        (f"http://youtube.com/watch?list=x&v={YOUTUBE}&t=30", f"t/0.tar::{YOUTUBE}"),
        (f"youtu.be/{YOUTUBE}?t=30", f"t/0.tar::{YOUTUBE}"),
        (f"https://www.youtube-nocookie.com/embed/{YOUTUBE}", f"t/0.tar::{YOUTUBE}"),
        ("https://freesound.org/people/somebody/sounds/12345/", "t/0.tar::12345__somebody__dog"),
        ("https://freesound.org/s/12345", "t/0.tar::freesound_12345"),
        ("a/b.FLAC", "train/0.tar::a/b"),
        ("b.wav", "train/0.tar::a/b"),
        ("nai\u0308ve", "t/0.tar::na\u00efve"),
        ("na\u00efve", "t/0.tar::nai\u0308ve"),
    ],
)
def test_a_line_may_be_an_address_or_the_name_of_a_file(tmp_path, line, key):
    path = tmp_path / "names.txt"
    path.write_bytes(f"# held out\r\n{line}\r\n".encode())
    blacklist = Blacklist.read([str(path)])
    assert len(blacklist) == 1 and blacklist.has(key, audio=AUDIO, texts={})
    assert not blacklist.has("t/0.tar::other", audio=AUDIO, texts={})


@pytest.mark.parametrize(
    "record", [{"url": "https://freesound.org/s/12345/"}, {"original_data": {"href": "/people/x/sounds/12345/"}}]
)
def test_ids_in_addresses_of_a_sample(record):
    assert has(["12345"], record=record) and not has(["1234"], record=record)
