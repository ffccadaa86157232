"""`pipe:COMMAND`: bounded, named when it fails, without a shell, and never without permission."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from clap_zero.data.members import BadSampleError
from clap_zero.data.places import ReadPolicy
from clap_zero.data.shards import Shard, ShardReader
from clap_zero.errors import DataError
from tests.unit.data.http_server import at_most
from tests.unit.data.shard_files import pair, write_tar

ROOT = Path(__file__).resolve().parents[3]
NUM = 6


@pytest.fixture
def good(tmp_path) -> Path:
    members = [member for n in range(NUM) for member in pair(f"k{n}", n)]
    return write_tar(tmp_path / "my good.tar", members)


@pytest.fixture
def policy(tmp_path) -> ReadPolicy:
    return ReadPolicy(cache_dir=str(tmp_path / "cache"), timeout_s=1, retries=1, allow_pipe=True)


def pipe(command: str) -> Shard:
    return Shard(f"pipe:{command}", "p", NUM)


def running(mark: str) -> list[int]:
    """Processes whose command line has a mark."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                words = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            found += [int(entry.name)] if mark.encode() in words else []
    return found


def test_a_good_pipe_is_run_once_and_read_as_a_file(good, policy, tmp_path):
    runs = tmp_path / "runs"
    script = tmp_path / "cat.sh"
    script.write_text(f'echo run >> "{runs}"\ncat "$1"\n')
    reader = ShardReader(policy)
    shard = pipe(f"sh {script} '{good}'")
    reader.prefetch(shard, 0)
    assert [reader.read(shard, n).key for n in range(NUM)] == [f"k{n}" for n in range(NUM)]
    assert reader.take_notes() == []
    reader.close()
    assert ShardReader(policy).read(shard, 0).key == "k0"  # from the cache
    assert runs.read_text() == "run\n"


@pytest.mark.parametrize(
    ("command", "shown", "words"),
    [
        ("false", "pipe:false", "ended with exit code 1"),
        ("sleep 99999", "pipe:sleep ...", "stalled"),
        ("sh -c 'echo; exec sleep 99999'", "pipe:sh ...", "stalled"),
        ("no-such-program-here", "pipe:no-such-program-here", "exit code 1: .*No such file"),
        ("sh -c 'echo no such bucket >&2; exit 3'", "pipe:sh ...", "exit code 3: no such bucket"),
        ("sh -c 'kill -9 $$'", "pipe:sh ...", "exit code -9"),
        ("sh -c 'exec >&-; exec sleep 99999'", "pipe:sh ...", "stalled"),
    ],
)
@pytest.mark.parametrize("missing", ["skip", "stop"])
def test_a_bad_pipe_is_named_in_time(policy, command, shown, words, missing):
    reader = ShardReader(replace(policy, missing=missing))
    with at_most(10):
        if missing == "stop":
            with pytest.raises(DataError, match=words) as error:
                reader.read(pipe(command), 0)
            assert str(error.value).startswith(f"{shown}: ") and "(2 attempts)" in str(error.value)
        else:
            for sample_id in range(NUM):
                with pytest.raises(BadSampleError, match=words):
                    reader.read(pipe(command), sample_id)
            assert len(reader.take_notes()) == 1
    reader.close()
    assert not running("99999")


def test_a_pipe_that_ends_early_gives_what_came(good, policy):
    reader = ShardReader(replace(policy, missing="skip"))
    shard = pipe(f"head -c 20000 '{good}'")
    found = []
    for sample_id in range(NUM):
        try:
            found.append(reader.read(shard, sample_id).key)
        except BadSampleError:
            found.append(None)
    assert found[0] == "k0" and found[-1] is None
    notes = reader.take_notes()
    assert any("cut short" in note for note in notes) and any("the index says 6" in note for note in notes)
    reader.close()


def test_without_permission_nothing_runs(tmp_path):
    shard = pipe(f"touch {tmp_path / 'ran'}")
    with pytest.raises(
        DataError, match=r"pipe:touch \.\.\. would run a command: allow it with --data\.allow_pipe true"
    ):
        ShardReader(ReadPolicy(cache_dir=str(tmp_path / "cache"), missing="skip")).read(shard, 0)
    assert not (tmp_path / "ran").exists()


def test_no_shell_reads_the_command(good, policy, tmp_path):
    """Substitutions, semicolons and redirections are arguments like any others."""
    reader = ShardReader(replace(policy, retries=0))
    for words in (
        f"; touch {tmp_path}/ran",
        f"$(touch {tmp_path}/ran)",
        f"> {tmp_path}/ran",
        f"`touch {tmp_path}/ran`",
    ):
        with pytest.raises(DataError, match="exit code 1"):
            reader.read(pipe(f"cat '{good}' {words}"), 0)
    assert not (tmp_path / "ran").exists()


def test_arguments_are_not_shown(policy):
    secret = "Authorization: Bearer SECRET"
    command = f"false -H '{secret}' --key=SECRET https://u:SECRET@host/a/0.tar?sig=SECRET s3://b/1.tar"
    with pytest.raises(DataError) as error:
        ShardReader(replace(policy, retries=0)).read(pipe(command), 0)
    assert "SECRET" not in str(error.value)
    assert str(error.value).startswith("pipe:false ... s3://b/1.tar: the command ended with exit code 1")


def test_commands_that_differ_in_arguments_are_not_mixed_up(good, policy, tmp_path):
    other = write_tar(tmp_path / "other" / "my good.tar", pair("other", 1))
    assert ShardReader(policy).read(pipe(f"cat '{good}'"), 0).key == "k0"
    assert ShardReader(policy).read(pipe(f"cat '{other}'"), 0).key == "other"


def test_a_command_with_open_quotes_is_said(policy):
    with pytest.raises(DataError, match="cannot be split into words: No closing quotation"):
        ShardReader(policy).read(pipe("cat 'a.tar"), 0)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT, None])
def test_no_program_outlives_its_reader(tmp_path, end):
    mark = f"8{os.getpid()}.77"
    program = (
        "import sys, time\n"
        "from clap_zero.data.shards import Shard, ShardReader\n"
        "from clap_zero.data.places import ReadPolicy\n"
        "reader = ShardReader(ReadPolicy(cache_dir=sys.argv[1], allow_pipe=True))\n"
        "reader.prefetch(Shard(f'pipe:sleep {sys.argv[2]}', '', 1), 0)\n"
        "print('reading', flush=True)\n"
        "sys.stdin.readline()\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "cache"), mark]
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "reading\n"
    deadline = time.monotonic() + 10
    while len(running(f"sleep\0{mark}")) < 1 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert running(f"sleep\0{mark}")
    if end is not None:
        process.send_signal(end)
    process.communicate("\n", timeout=10)
    time.sleep(0.3)
    assert not running(mark)
