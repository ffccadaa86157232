"""What a path or URL is, and what of it is shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from clap_zero.data.places import ReadPolicy, command_of, hide_secrets, host, is_remote, join, local_path, shown
from clap_zero.errors import DataError


@pytest.mark.parametrize("path", ["http://h/a.tar", "HTTPS://h/a", "s3://b/a", "pipe:cat a", "hf://d/a", "a::s3://b/c"])
def test_remote(path):
    assert is_remote(path)


@pytest.mark.parametrize("path", ["/a/b.tar", "a/b.tar", "a b:c/d.tar", "file:///a/b.tar", "C:\\a.tar", "", "1://x"])
def test_not_remote(path):
    assert not is_remote(path)


def test_file_urls_are_paths():
    assert local_path("file:///a/my%20data/0.tar") == "/a/my data/0.tar"
    assert local_path("/a/my%20data/0.tar") == "/a/my%20data/0.tar"


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("https://user:pass@h:8/a/0.tar?X-Amz-Signature=1&x=2", "https://h:8/a/0.tar"),
        ("https://token@h/a/0.tar", "https://h/a/0.tar"),
        ("https://u:p@ss@h/0.tar", "https://h/0.tar"),
        ("s3://b/a b/0.tar", "s3://b/a b/0.tar"),
        ("s3://b/0.tar?versionId=secret", "s3://b/0.tar"),
        ("gs://b/0.tar?token=secret", "gs://b/0.tar"),
        ("simplecache::https://u:p@h/0.tar?sig=1", "simplecache::https://h/0.tar"),
        ("/local/a?b@c/0.tar", "/local/a?b@c/0.tar"),
        ("pipe:aws s3 cp s3://b/0.tar -", "pipe:aws ... s3://b/0.tar ..."),
        ("pipe:curl -u me:pass https://me:pass@h/0.tar", "pipe:curl ... https://h/0.tar"),
    ],
)
def test_shown(path, name):
    assert shown(path) == name


def test_a_query_that_tells_files_apart_is_shown_as_its_hash():
    first, second = shown("https://h/download?id=1"), shown("https://h/download?id=2")
    assert first != second and first == shown("https://u:p@h/download?id=1")
    assert first.startswith("https://h/download?") and "id" not in first.removeprefix("https://h/download")


def test_secrets_in_what_libraries_say():
    words = "Cannot connect: url='https://u:p@h/a.tar?sig=S', then \"s3://k:s@b/x\" and https://h/a?token=T."
    assert hide_secrets(words) == "Cannot connect: url='https://h/a.tar', then \"s3://b/x\" and https://h/a"


def test_host():
    assert host("https://u:p@h:8/a/0.tar") == "https://h:8" and host("s3://bucket/a/b") == "s3://bucket"


@pytest.mark.parametrize(
    ("directory", "name", "place"),
    [
        ("/a/b", "0.tar", "/a/b/0.tar"),
        ("file:///a/b/", "0.tar", "/a/b/0.tar"),
        ("s3://b/t/", "0 1.tar", "s3://b/t/0 1.tar"),
        ("https://h/t", "50% #1?.tar", "https://h/t/50%25 %231%3F.tar"),
        ("https://h/t?sig=1/2", "0.tar", "https://h/t/0.tar?sig=1/2"),
    ],
)
def test_join(directory, name, place):
    assert join(directory, name) == place


@pytest.mark.parametrize("name", ["", "..", ".", "a/b.tar", "/etc/passwd", "../0.tar", "http://h/0.tar", "a\0.tar"])
def test_names_that_are_none(name):
    for directory in ("/a", "s3://b/a"):
        with pytest.raises(DataError, match="is no file name"):
            join(directory, name)


def test_commands():
    assert command_of("pipe:cat 'a b.tar' \"c d\"") == ["cat", "a b.tar", "c d"]
    for command in ("pipe:", "pipe:   ", "pipe:cat 'a"):
        with pytest.raises(DataError):
            command_of(command)


def test_the_cache_directory(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert ReadPolicy().cache_path == Path("/home/me/.cache/clap_zero/shards")
    assert ReadPolicy(cache_dir="~/x/../y").cache_path == Path("/home/me/y")
