"""The cache of downloaded shards, used by many processes at once."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from clap_zero.data.cache import ShardCache
from clap_zero.data.places import ReadPolicy
from clap_zero.data.remote import Remote
from clap_zero.data.shards import Shard, ShardReader
from clap_zero.errors import DataError
from tests.unit.data.http_server import Fault, Site, at_most, http_server

ROOT = Path(__file__).resolve().parents[3]
SIZE = 100_000


@pytest.fixture
def site() -> Iterator[Site]:
    with http_server() as site:
        for number in range(8):
            site.files[f"/{number}.tar"] = bytes([number]) * SIZE
        yield site


@pytest.fixture
def policy(tmp_path) -> ReadPolicy:
    return ReadPolicy(cache_dir=str(tmp_path / "my cache"), timeout_s=2, retries=0)


def load(cache: ShardCache, site: Site, number: int) -> bytes:
    descriptor, _ = cache.open(f"{site.url}/{number}.tar")
    try:
        return os.read(descriptor, SIZE + 1)
    finally:
        os.close(descriptor)


def entries(policy: ReadPolicy) -> list[Path]:
    return [path for path in policy.cache_path.iterdir() if path.is_file()]


def new(policy: ReadPolicy) -> ShardCache:
    return ShardCache(Remote(policy), policy)


def downloads(site: Site, number: int) -> int:
    return site.requests["GET", f"/{number}.tar"]


PROGRAM = """
import json, os, sys, time
from pathlib import Path
from clap_zero.data.cache import ShardCache
from clap_zero.data.remote import Remote
from clap_zero.data.places import ReadPolicy

url, directory, numbers, settings = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), json.loads(sys.argv[4])
policy = ReadPolicy(cache_dir=directory, **settings)
cache = ShardCache(Remote(policy), policy)
print("ready", flush=True)
sys.stdin.readline()
for number in numbers:
    descriptor, _ = cache.open(f"{url}/{number}.tar")
    data = os.read(descriptor, 10**7)
    os.close(descriptor)
    assert data == bytes([number]) * 100_000, (number, len(data))
print("done", flush=True)
"""


def start(site: Site, policy: ReadPolicy, numbers: list[int]) -> subprocess.Popen[str]:
    settings = {"cache_bytes": policy.cache_bytes, "timeout_s": policy.timeout_s, "retries": policy.retries}
    command = [
        sys.executable,
        "-c",
        PROGRAM,
        site.url,
        str(policy.cache_path),
        json.dumps(numbers),
        json.dumps(settings),
    ]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def go(processes: list[subprocess.Popen[str]]) -> None:
    """Lets processes begin together."""
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()


def finish(processes: list[subprocess.Popen[str]]) -> list[str]:
    return [process.communicate(timeout=60)[0] for process in processes]


def test_four_processes_download_a_shard_once(site, policy):
    processes = [start(site, policy, [3]) for _ in range(4)]
    go(processes)
    assert finish(processes) == ["done\n"] * 4
    assert downloads(site, 3) == 1
    assert [path.stat().st_size for path in entries(policy)] == [SIZE]


def test_many_processes_keep_the_cap_at_every_moment(site, policy):
    policy = replace(policy, cache_bytes=3 * SIZE + SIZE // 2, timeout_s=10)
    largest, over = [0], threading.Event()

    def watch() -> None:
        while not over.is_set():
            taken = 0
            for path in policy.cache_path.glob("*"):
                try:
                    taken += path.stat().st_size if path.is_file() else 0
                except FileNotFoundError:
                    continue
            largest[0] = max(largest[0], taken)

    policy.cache_path.mkdir(parents=True)
    watcher = threading.Thread(target=watch)
    watcher.start()
    processes = [start(site, policy, [(n * step) % 8 for n in range(24)]) for step in (1, 3, 5, 7)]
    go(processes)
    outcomes = finish(processes)
    over.set()
    watcher.join()
    assert outcomes == ["done\n"] * 4
    assert 2 * SIZE < largest[0] <= policy.cache_bytes


def test_what_was_used_longest_ago_goes_first(site, policy):
    policy = replace(policy, cache_bytes=3 * SIZE)
    for number in (0, 1, 2):
        load(new(policy), site, number)
        time.sleep(0.02)
    load(new(policy), site, 0)  # now 1 is the oldest
    load(new(policy), site, 3)
    assert len(entries(policy)) == 3
    for number in (0, 2, 3):
        load(new(policy), site, number)
    assert [downloads(site, number) for number in range(4)] == [1, 1, 1, 1]
    load(new(policy), site, 1)
    assert downloads(site, 1) == 2


def test_a_reader_is_not_disturbed_by_what_is_removed(site, policy):
    policy = replace(policy, cache_bytes=SIZE)
    cache = new(policy)
    descriptor, _ = cache.open(f"{site.url}/0.tar")
    load(cache, site, 1)
    assert os.read(descriptor, SIZE + 1) == bytes([0]) * SIZE
    os.close(descriptor)
    assert load(cache, site, 0) == bytes([0]) * SIZE and downloads(site, 0) == 2


def test_a_killed_downloader_leaves_no_poison(site, policy):
    site.faults["/5.tar"] = Fault(stall_after=SIZE // 2)
    process = start(site, replace(policy, timeout_s=60), [5])
    go([process])
    deadline = time.monotonic() + 20
    while not any(path.stat().st_size for path in policy.cache_path.glob("part-*")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    waiting = start(site, replace(policy, timeout_s=60), [5])
    go([waiting])
    time.sleep(0.5)
    site.faults.clear()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert finish([waiting]) == ["done\n"]  # it had waited for the lock of the dead one
    assert [path.stat().st_size for path in entries(policy)] == [SIZE]


def test_a_file_that_lost_its_bytes_is_downloaded_again(site, policy):
    load(new(policy), site, 0)
    os.truncate(entries(policy)[0], 1000)  # as after a crash of the machine
    assert load(new(policy), site, 0) == bytes([0]) * SIZE
    assert downloads(site, 0) == 2


def test_a_shard_larger_than_the_cap_is_said(site, policy):
    with pytest.raises(DataError, match=r"/0\.tar has 100000 bytes, the cache takes 99999: raise data\.cache_bytes"):
        load(new(replace(policy, cache_bytes=SIZE - 1)), site, 0)


@pytest.mark.parametrize("fault", [Fault(no_length=True), Fault(get_only=True, no_length=True)])
def test_what_does_not_tell_its_size_gets_an_eighth_of_the_cap(site, policy, fault):
    site.faults["/0.tar"] = fault
    assert load(new(replace(policy, cache_bytes=8 * SIZE)), site, 0) == bytes([0]) * SIZE
    shutil.rmtree(policy.cache_path)
    with pytest.raises(DataError, match=r"/0\.tar has more than 99999 bytes, the cache takes"):
        load(new(replace(policy, cache_bytes=8 * SIZE - 1)), site, 0)
    assert entries(policy) == []


def test_a_cache_that_is_too_small_is_noted(site, policy, tmp_path):
    from tests.unit.data.shard_files import pair, write_tar

    for number in range(2):
        path = write_tar(tmp_path / f"{number}.tar", pair(f"k{number}", number))
        site.files[f"/{number}.tar"] = path.read_bytes()
    reader = ShardReader(replace(policy, cache_bytes=path.stat().st_size))
    for _ in range(3):
        for number in range(2):
            assert reader.read(Shard(f"{site.url}/{number}.tar", "", 1), 0).key == f"k{number}"
    notes = reader.take_notes()
    reader.close()
    assert len(notes) == 1 and "raise data.cache_bytes" in notes[0]


def test_other_files_in_the_directory_are_left_alone(site, policy):
    policy.cache_path.mkdir(parents=True)
    (policy.cache_path / "thesis.tex").write_bytes(b"x" * SIZE)
    policy = replace(policy, cache_bytes=SIZE)
    for number in range(3):
        load(new(policy), site, number)
    assert (policy.cache_path / "thesis.tex").stat().st_size == SIZE


def test_a_directory_that_cannot_be_made_is_said(site, policy, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be used: Not a directory: set data.cache_dir"):
        load(new(replace(policy, cache_dir=str(tmp_path / "file" / "cache"))), site, 0)


def test_a_full_disk_is_said(site, policy):
    """A file system of 64 kB, in a name space of its own."""
    program = (
        "import sys\n"
        "from clap_zero.data.cache import ShardCache\n"
        "from clap_zero.data.remote import Remote\n"
        "from clap_zero.data.places import ReadPolicy\n"
        "from clap_zero.errors import DataError\n"
        "policy = ReadPolicy(cache_dir=sys.argv[2], timeout_s=5, retries=0)\n"
        "for name in ('0', 'unknown'):\n"
        "    try: ShardCache(Remote(policy), policy).open(f'{sys.argv[1]}/{name}.tar')\n"
        "    except DataError as error: print(error)\n"
    )
    site.files["/unknown.tar"] = site.files["/0.tar"]
    site.faults["/unknown.tar"] = Fault(no_length=True)
    policy.cache_path.mkdir(parents=True)
    mount = f"mount -t tmpfs -o size=64k none '{policy.cache_path}' && exec \"$@\""
    command = [
        "unshare",
        "-rm",
        "sh",
        "-c",
        mount,
        "sh",
        sys.executable,
        "-c",
        program,
        site.url,
        str(policy.cache_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no name spaces here: {done.stderr.strip()}")
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert len(lines) == 2 and all("set data.cache_dir to a larger disk" in line for line in lines), lines


def test_a_holder_that_does_not_move_is_not_waited_for_without_end(site, policy, monkeypatch):
    """Stopped, not killed: its lock stays. Nothing grows in the cache, so another download is better."""
    monkeypatch.setattr("clap_zero.data.cache._GRACE_S", 0.5)
    site.faults["/5.tar"] = Fault(stall_after=SIZE // 2)
    process = start(site, replace(policy, timeout_s=60), [5])
    go([process])
    while not any(path.stat().st_size for path in policy.cache_path.glob("part-*")):
        time.sleep(0.02)
    process.send_signal(signal.SIGSTOP)
    try:
        site.faults.clear()
        with at_most(10):
            assert load(new(replace(policy, timeout_s=0.5)), site, 5) == bytes([5]) * SIZE
    finally:
        process.kill()
        process.communicate()


def test_nothing_is_removed_for_what_does_not_fit_all_the_same(site, policy):
    cache = new(replace(policy, cache_bytes=3 * SIZE))
    for number in range(2):
        load(cache, site, number)
    with cache._reserved("other", SIZE), cache._exclusive():
        assert not cache._make_room(2 * SIZE + 1)
    assert len(entries(policy)) == 2


def test_a_shard_that_is_read_once_an_epoch_is_not_thrashed(site, policy, tmp_path):
    """A cache that is smaller than the data has to download each shard in each epoch."""
    from tests.unit.data.shard_files import pair, write_tar

    for number in range(8):
        site.files[f"/{number}.tar"] = write_tar(tmp_path / f"{number}.tar", pair(f"k{number}", number)).read_bytes()
    reader = ShardReader(replace(policy, cache_bytes=2 * len(site.files["/0.tar"]) + 2_000), shards_kept=4)
    for _ in range(4):
        for number in range(8):
            reader.read(Shard(f"{site.url}/{number}.tar", "", 1), 0)
    assert downloads(site, 0) == 4 and reader.take_notes() == []
    reader.close()
