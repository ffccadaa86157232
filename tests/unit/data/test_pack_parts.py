"""Parts of a pack and their join: the same pairs as one pack, refused where they do not fit, never lost."""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from clap_zero.data import pack_join, pack_scratch
from clap_zero.data.index import load_index
from clap_zero.data.pack import PackOptions, pack
from clap_zero.data.pack_cli import add_pack_arguments, options_from_args, pack_from_args
from clap_zero.data.pack_join import join
from clap_zero.data.pack_keys import Part
from clap_zero.data.pack_scratch import machine, scratch_name
from clap_zero.data.pack_sources import Columns
from clap_zero.errors import ConfigError, DataError
from tests.unit.data.packing import read_split, rejected, write_rows
from tests.unit.data.shard_files import audio_bytes
from tests.unit.data.span_files import write_spans

NUM_ROWS = 23


@pytest.fixture(scope="module")
def manifest(tmp_path_factory) -> Path:
    """23 clips, four of which cannot be packed, in two splits and one more that gets nothing; names that collide."""
    directory = tmp_path_factory.mktemp("in")
    rows = []
    for number in range(NUM_ROWS):
        path = directory / f"{number % 5}" / f"clip {number // 10}.wav"
        path = path.with_stem(f"{path.stem}.{number}") if number > 9 else path
        path = directory / f"{number}" / path.name
        path.parent.mkdir()
        path.write_bytes(b"junk" if number in (0, 9, 22) else audio_bytes(number, kind="WAV"))
        split = "lost" if number == 9 else ("test" if number % 4 == 3 else "train")
        rows.append({"file": str(path.relative_to(directory)), "caption": f"c{number}", "split": split})
    rows[14]["caption"] = ""
    return write_rows(directory / "m.csv", rows)


def options(out: Path, manifest: Path, **change) -> PackOptions:
    columns = Columns(split="split")
    return PackOptions(
        **{"out": out, "manifest": manifest, "columns": columns, "shard_size": 3, "progress": False} | change
    )


def pack_parts(out: Path, manifest: Path, count: int, **change) -> None:
    for number in range(1, count + 1):
        pack(options(out, manifest, part=Part(number, count), **change))


@pytest.fixture(scope="module")
def whole(manifest, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("whole")
    pack(options(out, manifest))
    return out


@pytest.fixture(scope="module")
def three_parts(manifest, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("parts")
    pack_parts(out, manifest, 3)
    return out


@pytest.fixture
def parts(three_parts, tmp_path) -> Path:
    """A fresh copy of three packed parts."""
    shutil.copytree(three_parts, tmp_path / "out")
    return tmp_path / "out"


def assert_joined(out: Path, whole: Path) -> None:
    """The pairs of one pack, in its order, with right indexes and nothing beside them."""
    assert sorted(path.name for path in out.iterdir()) == ["test", "train"]
    for split in ("train", "test"):
        assert read_split(out / split) == read_split(whole / split)
        assert rejected(out / split) == rejected(whole / split)
        sizes = json.loads((out / split / "sizes.json").read_text())
        assert list(sizes) == [f"{number}.tar" for number in range(len(sizes))]
        extra = ["index.json", "rejected.jsonl", "sizes.json", "spans.npy"]
        assert sorted(path.name for path in (out / split).iterdir()) == sorted([*sizes, *extra])
        index, expected = (json.loads((p / split / "index.json").read_text()) for p in (out, whole))
        assert {**index, "shards": 0} == {**expected, "shards": 0}
        for shard in index["shards"]:
            assert shard["size_bytes"] == (out / split / shard["name"]).stat().st_size
            assert shard["num_pairs"] == sizes[shard["name"]]
        spans = np.load(out / split / "spans.npy", allow_pickle=False)
        write_spans(out / split)
        np.testing.assert_array_equal(spans, np.load(out / split / "spans.npy"))


@pytest.mark.parametrize("count", [1, 2, 5, 30])
def test_joined_parts_are_one_pack(tmp_path, manifest, whole, count):
    pack_parts(tmp_path / "out", manifest, count, workers=0)
    report = join(tmp_path / "out")
    assert_joined(tmp_path / "out", whole)
    expected = pack(options(whole, manifest, overwrite=True))
    assert report.numbers() == expected.numbers()
    assert report.num_pairs + report.num_rejected == report.num_listed == report.num_items == NUM_ROWS
    assert load_index([str(tmp_path / "out" / "train")]).num_samples == report.splits["train"].num_pairs


def test_spans_of_a_pack_are_those_of_its_tars(whole):
    before = (whole / "train" / "spans.npy").read_bytes()
    assert len(np.load(whole / "train" / "spans.npy")) > 0
    assert write_spans(whole / "train").read_bytes() == before


def test_parts_packed_at_the_same_time(tmp_path, manifest, whole):
    with ThreadPoolExecutor(5) as pool:
        list(pool.map(lambda n: pack(options(tmp_path, manifest, part=Part(n, 5))), range(1, 6)))
    join(tmp_path)
    assert_joined(tmp_path, whole)


def test_the_same_part_twice_is_packed_once(parts, manifest):
    tar = parts / ".parts" / "2-of-3" / "train" / "0.tar"
    before = tar.stat()
    report = pack(options(parts, manifest, part=Part(2, 3)))
    assert tar.stat() == before and "was there already" in "\n".join(report.lines())
    assert report.num_listed == report.num_pairs + report.num_rejected
    with pytest.raises(DataError, match=r"2-of-3 is there already, and differs in max_seconds 600\.0 and 0\.01"):
        pack(options(parts, manifest, part=Part(2, 3), max_seconds=0.01))
    assert tar.stat() == before
    pack(options(parts, manifest, part=Part(2, 3), overwrite=True))
    assert tar.stat().st_ino != before.st_ino
    assert not list((parts / ".parts").glob(".packing-*"))


def test_missing_parts_are_named(parts, manifest):
    shutil.rmtree(parts / ".parts" / "2-of-3")
    before = sorted(parts.rglob("*"))
    with pytest.raises(DataError, match="1 of 3 parts are missing: 2"):
        join(parts)
    assert [path for path in sorted(parts.rglob("*")) if path.name != ".lock"] == before
    report = pack(options(parts, manifest, part=Part(2, 3)))
    assert f"all 3 parts are there: clap-zero pack --join --out {parts}" in report.lines()


def test_parts_of_two_divisions_are_refused(parts, manifest):
    pack(options(parts, manifest, part=Part(1, 2)))
    with pytest.raises(DataError, match=r"2 divisions \(1 of 2; 1, 2, 3 of 3\)"):
        join(parts)


def test_a_part_under_another_name_is_refused(parts):
    shutil.rmtree(parts / ".parts" / "2-of-3")
    shutil.copytree(parts / ".parts" / "1-of-3", parts / ".parts" / "2-of-3")
    with pytest.raises(DataError, match=r"2-of-3 holds part 1/3"):
        join(parts)


def test_a_part_twice_is_refused(parts):
    shutil.copytree(parts / ".parts" / "1-of-3", parts / ".parts" / "01-of-3")
    with pytest.raises(DataError, match=r"holds part 1/3, which is there twice"):
        join(parts)


@pytest.mark.parametrize(
    "change", [{"max_seconds": 0.02}, {"store": "logmel", "truncation": "fusion"}, {"shard_size": 4}]
)
def test_parts_of_other_options_are_refused(parts, manifest, change):
    pack(options(parts, manifest, part=Part(2, 3), overwrite=True, **change))
    with pytest.raises(DataError, match=f"part 2/3 differs from part 1/3 in {next(iter(change))}"):
        join(parts)
    assert (parts / ".parts" / "3-of-3" / "train" / "0.tar").is_file()


def test_parts_of_another_source_are_refused(parts, manifest):
    other = manifest.with_name("other.csv")
    other.write_text(manifest.read_text().replace("c7", "c77"))
    with pytest.raises(DataError, match="differs in the source"):
        pack(options(parts, other, part=Part(2, 3)))
    pack(options(parts, other, part=Part(2, 3), overwrite=True))
    with pytest.raises(DataError, match="part 2/3 differs from part 1/3 in the source"):
        join(parts)


@pytest.mark.parametrize("damage", ["cut", "gone", "no record", "broken record"])
def test_a_part_that_was_copied_in_pieces_is_refused(parts, damage):
    part = parts / ".parts" / "3-of-3"
    if damage == "cut":
        (part / "train" / "0.tar").write_bytes(b"x")
    elif damage == "gone":
        (part / "train" / "0.tar").unlink()
    elif damage == "no record":
        (part / "part.json").unlink()
    else:
        (part / "part.json").write_text('{"version": 1}')
    with pytest.raises(DataError, match=r"3-of-3.*pack (this )?part.*--overwrite"):
        join(parts)


def test_splits_that_are_there_are_kept_unless_told(parts, whole):
    (parts / "train").mkdir()
    (parts / "train" / "mine").touch()
    with pytest.raises(DataError, match=r"train is there already: give --overwrite; the parts stay"):
        join(parts)
    assert (parts / "train" / "mine").exists()
    join(parts, overwrite=True)
    assert_joined(parts, whole)


def test_a_second_join_says_so(parts):
    join(parts)
    with pytest.raises(DataError, match=r"has no parts.*the splits \['test', 'train'\] are there: joined already"):
        join(parts)


def test_a_join_beside_another_is_refused(parts):
    with pack_join._locked(parts / ".parts"), pytest.raises(DataError, match="joined by another process"):
        join(parts)


def test_nothing_usable_in_any_part_is_an_error_and_keeps_them(tmp_path):
    manifest = write_rows(
        tmp_path / "m.csv", [{"file": f"{n}.wav", "caption": "x", "split": "train"} for n in range(4)]
    )
    pack_parts(tmp_path / "out", manifest, 2)
    with pytest.raises(DataError, match=r"0 usable of 4 samples.*the file is missing \(4\)"):
        join(tmp_path / "out")
    assert (tmp_path / "out" / ".parts" / "2-of-2" / "part.json").exists()


def test_what_other_machines_work_in_is_never_touched(parts, manifest, whole):
    ours = parts / ".parts" / scratch_name(2**22 + 1)
    theirs = [
        parts / ".parts" / ours.name.replace(machine(), name)
        for name in (
            machine().rpartition("-")[0] + "-00000000",
            "node7-" + machine().rpartition("-")[2],
            "node7-0a0b0c0d",
        )
    ]
    for path in [ours, *theirs]:
        (path / "part").mkdir(parents=True)
    pack(options(parts, manifest, part=Part(3, 3), overwrite=True))
    assert not ours.exists() and all((path / "part").is_dir() for path in theirs)
    report = join(parts)
    assert all((path / "part").is_dir() for path in theirs)
    assert "is of a pack on another machine" in "\n".join(report.lines())
    shutil.rmtree(parts / ".parts")
    assert_joined(parts, whole)


def join_in_a_child(out: Path, die_at: int) -> bool:
    """Joins in a process that is killed at its `die_at`-th change of the disk; False if it came to its end before."""
    pid = os.fork()
    if pid == 0:
        steps = 0

        def step(function):
            def with_death(*args, **kwargs):
                nonlocal steps
                steps += 1
                if steps == die_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*args, **kwargs)

            return with_death

        for name in ("rename", "replace", "unlink", "mkdir", "touch", "rmdir", "open"):
            setattr(Path, name, step(getattr(Path, name)))
        for name in ("unlink", "rmdir"):
            setattr(os, name, step(getattr(os, name)))
        code = 1
        try:
            join(out, overwrite=True)
            code = 0
        finally:
            os._exit(code)
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


@pytest.mark.parametrize("stride", [9, pytest.param(1, marks=pytest.mark.long)])
def test_a_join_killed_at_any_step_is_finished_by_the_same_command(three_parts, tmp_path, whole, stride):
    old = tmp_path / "old"
    shutil.copytree(three_parts, old)
    shutil.copytree(whole / "test", old / "train")  # to be replaced
    for die_at in range(1, 1000, stride):
        out = tmp_path / f"out{die_at}"
        shutil.copytree(old, out)
        killed = join_in_a_child(out, die_at)
        if killed:
            assert (out / "train").exists() or (out / ".parts" / "join" / "old" / "train").exists(), (
                "the old split is lost"
            )
            if (out / ".parts" / "join").exists() or any((out / ".parts").glob("*-of-3")):
                join(out, overwrite=True)
            else:  # all was done but the removal of what is empty
                shutil.rmtree(out / ".parts", ignore_errors=True)
        assert_joined(out, whole)
        shutil.rmtree(out)
        if not killed:
            break
    assert 40 < die_at < 900


def test_parts_are_not_changed_once_their_join_has_begun(parts, manifest, monkeypatch, whole):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pack_join, "index_split", full)
    with pytest.raises(DataError, match="No space left on device.*nothing is lost: the same command goes on"):
        join(parts)
    monkeypatch.undo()
    with pytest.raises(DataError, match="the join of the parts in .* has begun: finish it"):
        pack(options(parts, manifest, part=Part(2, 3), overwrite=True))
    join(parts)
    assert_joined(parts, whole)


def test_a_part_that_another_machine_published_meanwhile_stays(tmp_path, manifest, monkeypatch):
    target = tmp_path / ".parts" / "1-of-2"

    def raced(made, place, scratch):
        (place / "train").mkdir(parents=True)
        (place / "train" / "theirs").touch()
        made.rename(place)

    monkeypatch.setattr("clap_zero.data.pack.take_place", raced)
    with pytest.raises(DataError, match="not empty"):
        pack(options(tmp_path, manifest, part=Part(1, 2)))
    assert (target / "train" / "theirs").exists() and not pack_scratch.leftovers(tmp_path / ".parts")


def run(*words: object) -> argparse.Namespace:

    parser = argparse.ArgumentParser()
    add_pack_arguments(parser)
    return parser.parse_args([str(word) for word in words])


def test_command_line(tmp_path, manifest, whole, capsys):
    words = ["--manifest", manifest, "--split-column", "split", "--shard-size", 3, "--out", tmp_path, "--no-progress"]
    for number in (2, 1):
        pack_from_args(run(*words, "--workers", 1, "--part", f"{number}/2"))
    assert "1 of 2 parts are still to be packed: 1" in capsys.readouterr().out
    pack_from_args(run("--join", "--out", tmp_path))
    assert f"{NUM_ROWS} rows: 19 packed, 4 rejected, 0 said twice" in capsys.readouterr().out
    assert_joined(tmp_path, whole)
    for text, reason in [
        ("0/4", "numbered from 1 to 4"),
        ("5/4", "numbered from 1"),
        ("1", "i/n"),
        ("1/0", "from 1 to 1"),
    ]:
        with pytest.raises(ConfigError, match=reason):
            options_from_args(run(*words, "--part", text))
    with pytest.raises(SystemExit):
        run("--join", "--manifest", manifest, "--out", tmp_path)


def test_same_files(three_parts, manifest, tmp_path):
    """A part does not depend on the number of processes either."""
    pack(options(tmp_path, manifest, part=Part(2, 3), workers=2))
    compared = filecmp.dircmp(three_parts / ".parts" / "2-of-3" / "train", tmp_path / ".parts" / "2-of-3" / "train")
    assert compared.common_files and not compared.left_only and not compared.right_only
    _, different, errors = filecmp.cmpfiles(compared.left, compared.right, compared.common_files, shallow=False)
    assert not different and not errors
