"""Whoever names recordings, a table or a dataset in place of shards reads the command that makes shards of them."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from clap_zero.data.index import load_index
from clap_zero.data.places import ReadPolicy
from clap_zero.errors import DataError


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with what people have before they have shards."""
    for name in (
        *("empty/.hidden", "wavs/dog/1.WAV", "wavs/dog/1.txt", "listed/list.csv", "listed/audio/1.flac"),
        *("hub/data-00000.arrow", "notes/read.me", "packed/train/0.tar", "packed/test/0.tar"),
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    with tarfile.open(tmp_path / "no_suffix", "w") as tar:
        for name in ("a.flac", "a.txt"):
            tar.addfile(tarfile.TarInfo(name), io.BytesIO())
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("empty", "/empty is empty; to make shards: run clap-zero pack --folder RECORDINGS --out DIR"),
        ("wavs", "/wavs holds recordings (dog/1.WAV) and no .tar files: run clap-zero pack --folder {here}/wavs --out"),
        ("wavs/dog/1.WAV", "is a recording, not a shard: run clap-zero pack --folder {here}/wavs/dog --out DIR"),
        ("wavs/dog/*.WAV", "no .tar files: run clap-zero pack --folder {here}/wavs/dog --out DIR"),
        ("wavs/*.tar", "'*' is not expanded"),
        (
            "listed",
            "/listed holds a table (list.csv) and no .tar files: run clap-zero pack --manifest {here}/listed/list",
        ),
        ("listed/list.csv", "is a table, not a shard: run clap-zero pack --manifest {here}/listed/list.csv --out DIR"),
        (
            "hub",
            "a Hugging Face dataset (data-00000.arrow) and no .tar files: run clap-zero pack --dataset {here}/hub",
        ),
        ("hub/data-00000.arrow", "a part of a dataset, not a shard: run clap-zero pack --dataset {here}/hub --out DIR"),
        ("notes", "/notes holds no .tar files; to make shards: run clap-zero pack"),
        ("packed", "there are some in its test, train: give {here}/packed/train"),
        ("packed/trian", "/packed/trian is not there: did you mean {here}/packed/train?"),
        ("laion/sounds", "the Hugging Face hub is meant: run clap-zero pack --dataset laion/sounds --out DIR"),
        ("no/such/place", "/no/such/place is not there; to make shards: run clap-zero pack --folder RECORDINGS"),
        ("packed/train/1.tar", "1 of 1 shards are missing"),
        ("packed/train/{0..3}.tar", "3 of 4 shards are missing"),
    ],
)
def test_what_is_no_shard_gets_its_command(here: Path, pattern: str, said: str) -> None:
    with pytest.raises(DataError) as caught:
        load_index((pattern,))
    message = str(caught.value)
    assert said.format(here=here) in message, message
    assert "\n" not in message


def test_a_name_with_spaces_can_be_pasted_into_a_shell(tmp_path: Path) -> None:
    (tmp_path / "my sounds").mkdir()
    (tmp_path / "my sounds" / "a.mp3").touch()
    with pytest.raises(DataError, match=f"--folder '{tmp_path}/my sounds' --out DIR"):
        load_index((str(tmp_path / "my sounds"),))


def test_a_tar_of_any_name_is_read_and_a_missing_place_can_be_passed_over(here: Path) -> None:
    assert load_index(("no_suffix",)).num_shards == 1
    assert load_index(("no_suffix", "not/there"), policy=ReadPolicy(missing="skip")).num_shards == 1
