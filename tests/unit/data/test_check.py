"""`clap-zero check`: what it finds, when it says that training would stop, and that nothing holds it up."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import psutil
import pytest

from clap_zero import cli
from clap_zero.audio.clips import FeatureConfig
from clap_zero.audio.decode import load_clip
from clap_zero.audio.features import ClapFeatures
from clap_zero.audio.logmel import encode_logmel
from clap_zero.data.blacklist import Blacklist
from clap_zero.data.captions import CaptionRule
from clap_zero.data.check_index import target_names
from clap_zero.data.check_pool import read_all
from clap_zero.data.check_worker import Bad, Done, Good, Task, run_worker
from clap_zero.data.index import load_index
from clap_zero.data.pipeline import DecodeClip
from clap_zero.errors import DataError
from tests.unit.data.reading import plan, take
from tests.unit.data.shard_files import audio_bytes, pair, write_split, write_tar
from tests.unit.data.span_files import span_rows

INDEXES = ("sizes.json", "index.json", "spans.npy")


def run(*argv: object) -> int:
    return cli.main(["check", *map(str, argv), "--workers", "1"])


def test_every_finding_is_printed_and_summed(tmp_path, capsys):
    members = [m for n in range(20) for m in pair(f"k{n}", n)]
    members += [("no flac.flac", b"fLaC"), ("no flac.txt", b"x"), ("empty.wav", b""), ("empty.txt", b"x")]
    members += [("blank.flac", audio_bytes(30)), ("blank.json", b'{"text": " "}')]
    members += [("listed.flac", audio_bytes(31)), ("listed.txt", b"x"), ("alone.flac", audio_bytes(32))]
    members += [("long.flac", audio_bytes(33)), ("long.txt", b"dog " * 200)]
    path = write_tar(tmp_path / "train" / "0.tar", members)
    path.write_bytes(path.read_bytes().rstrip(b"\0"))  # without an end mark
    (tmp_path / "names.txt").write_text("listed\ntrain/0.tar::listed\nnobody\n")
    report = tmp_path / "findings.json"
    assert run(path.parent, "--blacklist", tmp_path / "names.txt", "--json", report) == 0
    out = capsys.readouterr().out
    for line in (
        "unusable: train/0.tar::empty: empty file (0 bytes)",
        "unusable: train/0.tar::blank: 'text' is empty",
        "unpaired: train/0.tar::alone: no .json or .txt member",
        f"note: {path}: has no end mark",
        "checked 25 samples in 1 shards", "21 usable", "3 unusable (12.00 %)", "1  empty file",
        "1  FLAC cannot be decoded", "1  samples that the blacklist names",
        "the blacklist has 3 names and leaves out 1 of these samples; 1 of its names are names of none",
        "1  keys without audio or caption",
        "1  captions that are cut",
    ):  # fmt: skip
        assert line in out, line
    written = json.loads(report.read_text())
    assert {finding["where"] for finding in written["findings"] if finding["kind"] == "unusable"} == {
        f"train/0.tar::{key}" for key in ("no flac", "empty", "blank")
    }
    assert written["sums"]["num_good"] == 21 and written["sums"]["stop_reason"] is None


def test_indexes_are_written_where_they_are_missing_only(tmp_path, capsys):
    split = write_split(tmp_path / "train", [4, 3], declare=False)
    assert run(split) == 0
    assert json.loads((split / "sizes.json").read_text()) == {"0.tar": 4, "1.tar": 3}
    index = json.loads((split / "index.json").read_text())
    assert index["num_pairs"] == 7 and index["duration_s"] == pytest.approx(7 * 0.05)
    assert [entry["size_bytes"] for entry in index["shards"]] == [(split / f"{n}.tar").stat().st_size for n in (0, 1)]
    with_spans = load_index([str(split)])
    assert with_spans.shard(1).spans.first_row == 4
    assert span_rows(str(split / "1.tar"))["length"].all() and len(take(with_spans, 7)) == 7

    (split / "sizes.json").write_text('{"0.tar": 4, "1.tar": 2}')
    (split / "index.json").unlink()
    before = (split / "spans.npy").read_bytes()
    assert run(split) == 0
    assert json.loads((split / "sizes.json").read_text())["1.tar"] == 2
    assert json.loads((split / "index.json").read_text())["num_pairs"] == 6
    assert run(split, "--rewrite-index") == 0
    assert json.loads((split / "sizes.json").read_text())["1.tar"] == 3
    assert (split / "spans.npy").read_bytes() == before
    for name in INDEXES:
        (split / name).unlink()
    assert run(split, "--no-index") == 0 and run(split / "0.tar") == 0
    assert not any((split / name).exists() for name in INDEXES)
    assert "not all of its tars were read" in capsys.readouterr().out


@pytest.mark.parametrize(("good", "bad"), [(8, 12), (12, 8), (3, 5), (5, 3), (40, 16), (40, 17), (0, 2), (1, 0)])
def test_it_exits_with_3_exactly_when_training_stops(tmp_path, capsys, good, bad):
    members = [m for n in range(good) for m in pair(f"s{n:04d}", n)]
    members += [m for n in range(bad) for m in ((f"bad{n}.flac", b"junk"), (f"bad{n}.txt", b"x"))]
    write_tar(tmp_path / "train" / "0.tar", members)
    try:
        take(tmp_path / "train", good + bad)
        stopped = False
    except DataError:
        stopped = True
    assert run(tmp_path / "train") == (3 if stopped else 0)
    assert ("training on these shards would stop" in capsys.readouterr().err) == stopped


@pytest.mark.parametrize("num_broken", [1, 2])
def test_whole_broken_shards_among_many_end_both_or_neither(tmp_path, num_broken):
    split = write_split(tmp_path / "train", [40], declare=False)
    for number in range(1, 20):
        shutil.copy(split / "0.tar", split / f"{number}.tar")
    (split / "sizes.json").write_text(json.dumps({f"{number}.tar": 40 for number in range(20)}))
    for number in range(num_broken):
        (split / f"{number}.tar").write_bytes(b"no tar")
    stopped = False
    try:
        take(split, 800)
    except DataError:
        stopped = True
    assert stopped == (num_broken > 1)
    assert run(split, "--no-index") == (3 if stopped else 0)


def test_a_blacklist_of_nearly_everything_ends_neither(tmp_path):
    split = write_split(tmp_path / "train", [20])
    keys = [batch.keys[0] for batch in take(split, 20)]
    (tmp_path / "names.txt").write_text("\n".join(sorted(keys)[:18]))
    assert len(take(split, 20, blacklist=(str(tmp_path / "names.txt"),))) == 20
    assert run(split, "--blacklist", tmp_path / "names.txt") == 0


def test_output_that_cannot_be_written_is_one_line_and_leaves_nothing(tmp_path, capsys):
    split = write_split(tmp_path / "train", [2])
    assert run(split, "--json", "/dev/full") == 2
    assert "--json /dev/full cannot be written" in capsys.readouterr().err
    kept = tmp_path / "kept.json"
    kept.write_text("old")
    words = [sys.executable, "-m", "clap_zero.cli", "check", str(split), "--workers", "1", "--json", str(kept)]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, cwd=Path.cwd())
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "the output cannot be written: No space left on device" in done.stderr
    assert not list(tmp_path.glob(".kept*"))


def test_indexes_of_remote_directories_get_names_of_their_own():
    assert target_names(["http://h/a/train/"]) == ["train"]
    assert target_names(["http://h/a/train/", "s3://h/b/train/"]) == ["a/train", "b/train"]
    assert target_names(["http://h/../train/", "https://h/train/"]) == ["http/h/train", "https/h/train"]
    assert target_names(["http://h/train/"] * 2) == ["http/h/train-0", "http/h/train-1"]


def test_stored_log_mels_are_read_and_have_to_fit_the_model(tmp_path, capsys):
    for kind, other in (("fusion", "rand_trunc"), ("rand_trunc", "fusion")):
        split = tmp_path / kind
        write_tar(split / "0.tar", logmels(kind, range(3)))
        assert run(split, "--truncation", kind) == run(split) == 0
        assert f"3  log-mels, stored for {kind} models alone" in capsys.readouterr().out
        assert run(split, "--truncation", other) == 3
        said = capsys.readouterr()
        assert "0 usable of 3 samples" in said.err and f"--truncation {kind} of check" in said.out


def test_log_mels_of_both_kinds_are_for_no_model(tmp_path, capsys):
    write_tar(tmp_path / "train" / "0.tar", logmels("fusion", range(20)) + logmels("rand_trunc", range(20, 40)))
    assert run(tmp_path / "train") == 3
    assert "20  stored log-mel was made for another model" in capsys.readouterr().out


def logmels(kind: Literal["fusion", "rand_trunc"], numbers: Iterable[int]) -> list[tuple[str, bytes]]:
    features = ClapFeatures(FeatureConfig(kind), device="cpu")
    members = []
    for number in numbers:
        clip = load_clip(audio_bytes(number), max_seconds=1)
        members += [(f"k{number}.logmel", encode_logmel(clip, features)), (f"k{number}.txt", b"x")]
    return members


class Fatal(DecodeClip):
    """Dies or hangs where a decoder might."""

    def __call__(self, sample) -> None:
        if sample["__key__"].endswith("::kills"):
            os.kill(os.getpid(), signal.SIGSEGV)
        if sample["__key__"].endswith("::hangs"):
            time.sleep(600)
        if sample["__key__"].endswith("::raises"):
            raise ZeroDivisionError("division by zero")
        super().__call__(sample)


def fatal_worker(connection, place, **arguments) -> None:
    from clap_zero.data import check_worker

    check_worker.DecodeClip = Fatal
    run_worker(connection, place, **arguments)


def test_a_sample_that_kills_or_hangs_a_process_is_named_and_the_rest_is_read(tmp_path):
    members = [*pair("a", 1), *pair("kills", 2), *pair("hangs", 3), *pair("b", 4), *pair("raises", 6)]
    write_tar(tmp_path / "train" / "0.tar", members)
    write_tar(tmp_path / "train" / "1.tar", pair("c", 5))
    index = load_index([str(tmp_path / "train")])
    tasks = [Task(number, index.shard(number), CaptionRule()) for number in range(2)]
    said = list(read_all(tasks, plan=plan(), blacklist=Blacklist(), workers=2, limit_s=5, target=fatal_worker))
    bad = {message.key: message for _, message in said if isinstance(message, Bad)}
    # What a decoder raises that nobody foresaw is skipped in training.
    assert bad.pop("train/0.tar::raises") == Bad("train/0.tar::raises", "ZeroDivisionError in Fatal: division by zero")
    assert set(bad) == {"train/0.tar::kills", "train/0.tar::hangs"} and all(m.fatal for m in bad.values())
    assert "SIGSEGV" in bad["train/0.tar::kills"].reason and "stuck" in bad["train/0.tar::hangs"].reason
    assert sum(isinstance(message, Good) for _, message in said) == 3
    assert sum(isinstance(message, Done) for _, message in said) == 2


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_it_can_be_interrupted_and_leaves_no_process(tmp_path, sent):
    split = write_split(tmp_path / "train", [32], seconds=3.0, declare=False)
    for number in range(1, 30):
        shutil.copy(split / "0.tar", split / f"{number}.tar")
    script = "import sys; from clap_zero.cli import main; sys.exit(main(sys.argv[1:]))"
    words = [sys.executable, "-c", script, "check", str(split), "--workers", "2", "--no-index"]
    program = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path.cwd())
    process = psutil.Process(program.pid)
    until = time.monotonic() + 60
    while len(process.children(recursive=True)) < 4 and program.poll() is None:  # tracker, server, two workers
        assert time.monotonic() < until
        time.sleep(0.05)
    children = process.children(recursive=True)
    program.send_signal(sent)
    _, err = program.communicate(timeout=30)
    assert program.returncode == (130 if sent == signal.SIGINT else -9), err
    assert "Traceback" not in err
    assert not psutil.wait_procs(children, timeout=10)[1]


def test_what_cannot_be_read_or_written_is_said(tmp_path, capsys):
    assert run(tmp_path / "nowhere") == 3
    split = write_split(tmp_path / "train", [2])
    assert run(split, "--json", tmp_path / "no" / "where.json") == 2
    assert run(split, "--blacklist", tmp_path / "none.txt") == 3
    assert cli.main(["check", str(split), "--workers", "0"]) == 2
    assert cli.main(["check", str(split), "--max_seconds", "0"]) == 2
    assert cli.main(["check", str(split), "--max-bad-fraction", "2"]) == 2
    assert cli.main(["check"]) == 2
    (split / "1.tar").mkdir()
    (split / "sizes.json").write_text('{"0.tar": 2, "1.tar": 1}')
    assert run(split) == 3
    assert "1.tar: the shard cannot be read" in capsys.readouterr().err


def test_a_shard_that_goes_away_meanwhile_is_a_lot_of_unusable_samples(tmp_path):
    split = write_split(tmp_path / "train", [2, 3])
    index = load_index([str(split)])
    (split / "0.tar").unlink()
    tasks = [Task(number, index.shard(number), CaptionRule()) for number in range(2)]
    said = [message for _, message in read_all(tasks, plan=plan(), blacklist=Blacklist(), workers=1)]
    assert [m.reason for m in said if isinstance(m, Bad)] == ["the shard cannot be read: No such file or directory"] * 2
    assert sum(isinstance(message, Good) for message in said) == 3
