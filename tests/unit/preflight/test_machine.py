"""What is found out about one machine."""

from __future__ import annotations

import fcntl
import os
import resource
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from clap_zero.preflight import machine, space
from clap_zero.preflight.build_locks import STALE_AFTER_S, clear_stale_locks, clock_of
from clap_zero.preflight.code import code_hash, commit
from clap_zero.preflight.compare import clock_skew, compare
from clap_zero.preflight.machine import Facts, facts_here
from clap_zero.preflight.node import Request, examine
from clap_zero.preflight.table import ranges, told_rate
from clap_zero.preflight.versions import installed_versions, known_bad, missing_packages, numbers

GOOD = {"clap-zero": "0.1.0", "torch": "2.14.1", "deepspeed": "0.19.8", "transformers": "5.24.0", "wandb": "0.31.0"}


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    """A lock as a killed compilation leaves it, an hour ago."""
    folder = tmp_path / "py311_cu130" / "fused_adam"
    folder.mkdir(parents=True)
    for name in ("lock", "build.ninja"):
        (folder / name).touch()
        old = time.time() - 3600
        os.utime(folder / name, (old, old))
    return folder / "lock"


def cleared(lock: Path, *, kernel_locks: bool = False) -> list[str]:
    return [str(one) for one in clear_stale_locks(lock.parents[2], kernel_locks=kernel_locks, shared=False)]


def test_a_stale_build_lock_is_removed_and_told(lock: Path) -> None:
    assert cleared(lock) == [f"removed the build lock {lock}: 60 min old, and no process holds it"]
    assert not lock.exists() and (lock.parent / "build.ninja").exists()
    assert cleared(lock) == []


def test_a_build_lock_that_another_process_has_open_stays(lock: Path) -> None:
    program = f"import time\nheld = open({str(lock)!r})\nprint('open', flush=True)\ntime.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "open\n"
        assert cleared(lock) == []
        holder.kill()
    assert lock.exists()
    assert len(cleared(lock)) == 1


def test_a_lock_on_a_disk_of_several_machines_is_told_after_an_hour_and_stays(lock: Path) -> None:
    def told() -> list[str]:
        return [str(one) for one in clear_stale_locks(lock.parents[2], kernel_locks=False, shared=True)]

    recent = time.time() - STALE_AFTER_S - 60
    os.utime(lock.parent / "build.ninja", (recent, recent))
    assert told() == []
    old = time.time() - 7200
    for path in lock.parent.iterdir():
        os.utime(path, (old, old))
    assert told() == [f"the build lock {lock} is 120 min old: if no machine compiles there, rm it"]
    assert lock.exists()


def test_ages_are_told_by_the_clock_of_the_disk(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine's clock may be ahead of the file server's."""
    monkeypatch.setattr(time, "time", lambda: 4e9)
    assert abs(clock_of(lock.parent) - lock.stat().st_mtime - 3600) < 60
    assert not [path for path in lock.parent.iterdir() if path.name not in ("lock", "build.ninja")]
    assert clock_of(lock.parent / "no") == 4e9


def test_disks_of_several_machines_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = "1 0 0:1 / / rw - ext4 /dev/a rw\n2 1 0:2 / /home rw shared:1 - nfs4 server:/home rw\n"
    mounts += "3 2 0:3 / /home/my\\040disk rw - xfs /dev/b rw\n"
    monkeypatch.setattr(Path, "read_text", lambda self: mounts)
    places = ("/var/x", "/home/ann/.cache", "/homes/bob", "/home/my disk/x")
    assert [space.may_be_shared(Path(place)) for place in places] == [False, True, False, False]


def test_a_build_that_still_writes_keeps_its_lock(lock: Path) -> None:
    """On a shared disk its process may be another machine's."""
    recent = time.time() - STALE_AFTER_S + 30
    os.utime(lock.parent / "build.ninja", (recent, recent))
    assert cleared(lock) == [] and lock.exists()


def test_where_the_kernel_keeps_the_lock_a_file_left_over_does_no_harm_and_stays(lock: Path) -> None:
    with lock.open("r+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert cleared(lock, kernel_locks=True) == []
    assert cleared(lock, kernel_locks=True) == [] and lock.exists()


@pytest.mark.parametrize(
    ("change", "level", "text"),
    [
        ({"deepspeed": "0.17.6"}, "error", "deepspeed 0.17.6 computes wrong ZeRO-2 gradients"),
        ({"deepspeed": "0.18.2"}, "error", "deepspeed 0.18.2 computes wrong ZeRO-2 gradients"),
        ({"deepspeed": "0.18.9", "torch": "2.11.0"}, "warning", "loses gradients of several backwards"),
        ({"deepspeed": "0.19.2", "torch": "2.11.0"}, "warning", "activation checkpointing and frozen parameters"),
        ({"deepspeed": "0.19.4"}, "error", "does not compile its kernels with torch 2.14.1"),
        ({"torch": "2.7.0", "deepspeed": "0.19.8"}, "warning", "torch 2.7.0 can hang"),
        ({"deepspeed": "0.17.1", "torch": "2.9.0"}, "warning", "wandb 0.31.0 does not work with deepspeed 0.17.1"),
        ({"transformers": "5.5.1"}, "warning", "transformers 5.5.1 gives BatchNorm buffers to rank 0 only"),
        ({"torchaudio": "2.11.1", "torch": "2.10.0"}, "error", "torchaudio 2.11.1 needs torch 2.11"),
    ],
)
def test_versions_known_to_be_bad_are_told(change: dict[str, str], level: str, text: str) -> None:
    found = [one for one in known_bad({**GOOD, **change}) if text in one.text]
    assert [one.level for one in found] == [level]


def test_versions_that_are_good_are_not_told() -> None:
    assert list(known_bad(GOOD)) == [] == list(missing_packages(GOOD))
    broken = {**GOOD, "torch": "not installed"}
    assert [one.text.partition(":")[0] for one in missing_packages(broken)] == [
        "torch is not installed in this environment"
    ]
    assert [one.text for one in known_bad(installed_versions()) if one.level == "error"] == []
    assert numbers("2.14.1+cu130") == (2, 14, 1) and numbers("5") == (5, 0, 0) and numbers("0.19.8rc1") == (0, 19, 8)


def test_the_code_is_known_by_its_content(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.py").write_text("x = 1\n")
    before = code_hash(tmp_path)
    (tmp_path / "sub" / "a.pyc").write_text("ignored")
    assert code_hash(tmp_path) == before
    (tmp_path / "sub" / "a.py").write_text("x = 2\n")
    changed = code_hash(tmp_path)
    (tmp_path / "sub" / "a.py").rename(tmp_path / "a.py")
    assert len({before, changed, code_hash(tmp_path)}) == 3


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed here")
def test_the_commit_is_read_as_git_says_it(tmp_path: Path) -> None:
    assert commit(tmp_path) == ""

    def git(*words: str) -> str:
        identity = ("-c", "user.name=x", "-c", "user.email=x@example.org")
        return subprocess.run(
            ["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout.strip()

    git("init", "-q", "-b", "some/branch")
    git("commit", "-q", "--allow-empty", "-m", "x")
    expected = git("rev-parse", "HEAD")[:12]
    assert commit(tmp_path) == expected
    git("pack-refs", "--all")
    assert commit(tmp_path) == expected
    git("worktree", "add", "-q", "-b", "other", "tree")
    assert commit(tmp_path / "tree") == expected
    git("checkout", "-q", "--detach")
    assert commit(tmp_path) == expected


def test_a_directory_is_written_and_left_as_it_was(tmp_path: Path) -> None:
    assert space.write_fault(tmp_path) is None and not list(tmp_path.iterdir())
    assert space.write_fault(tmp_path / "no") == "No such file or directory"
    assert space.nearest_directory(tmp_path / "a" / "b") == tmp_path
    mark = space.leave_mark(tmp_path, "token")
    assert space.sees_mark(tmp_path, "token") and not space.sees_mark(tmp_path, "other")
    mark.unlink()
    assert not space.sees_mark(tmp_path, "token")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small file system")
def test_a_disk_without_room_is_an_error_with_what_is_left(tmp_path: Path) -> None:
    """A real file system of 200 kB, in a mount namespace of its own."""
    program = (
        "import sys\nfrom pathlib import Path\nfrom clap_zero.preflight.space import check_directory\n"
        "print(*check_directory(Path(sys.argv[1]), what='the run directory'))"
    )
    script = 'mount -t tmpfs -o size=200k tmpfs "$1" && exec "$2" -c "$3" "$1"'
    words = ["unshare", "-m", "sh", "-c", script, "sh", str(tmp_path), sys.executable, program]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip(f"no mount namespaces here: {done.stderr.strip()}")
    assert done.stdout == (
        f"the run directory {tmp_path} cannot be written: No space left on device, 0.2 MB free; expected: room for the "
        "run, at least 100 MB\n"
    ), done.stderr


def test_the_limit_of_open_files_is_raised_and_a_low_one_told() -> None:
    """In a process of its own: limits stay."""
    program = (
        "import resource as r, sys\nr.setrlimit(r.RLIMIT_NOFILE, (256, int(sys.argv[1])))\n"
        "from clap_zero.preflight.machine import check_limits\n"
        "print(*check_limits())\nprint(r.getrlimit(r.RLIMIT_NOFILE)[0])"
    )

    def limits(hard: int) -> list[str]:
        words = [sys.executable, "-c", program, str(hard)]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < 5000:
        pytest.skip(f"the hard limit is {hard} here")
    assert limits(5000) == ["", "5000"]
    line, raised = limits(300)
    assert line.startswith("a process may open 300 files, 4096 are expected") and raised == "300"


def test_a_head_node_needs_no_gpu_and_all_others_are_alike() -> None:
    """The usual cluster: the machine that starts the ranks is not in the hostfile."""
    head = replace(facts_here(), versions=GOOD)
    gpu, other = (replace(head, gpus=[{"name": name}]) for name in ("NVIDIA H200", "NVIDIA L4"))

    def told(*nodes: Facts) -> list[tuple[str, str]]:
        named = [("head", head), *((f"node{number}", facts) for number, facts in enumerate(nodes))]
        return [(one.level, str(one)) for one in compare(named, computing=named[1:])]

    assert told(gpu, gpu) == [] == told(head, head)
    assert told(head, gpu) == [("error", "node0: its kind of GPU is none, expected NVIDIA H200 as on node1")]
    assert told(gpu, other) == [("warning", "node1: its kind of GPU is NVIDIA L4, expected NVIDIA H200 as on node0")]


def test_a_small_disk_for_temporary_files_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers have some 64 MB in memory."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    levels = []
    for free in (64_000_000, 3_000_000, 10**9):
        monkeypatch.setattr(space, "free_bytes", lambda path, free=free: free)
        levels.append([one.level for one in machine.check_temporary()])
    assert levels == [["warning"], ["error"], []]
    monkeypatch.setattr(space, "write_fault", lambda path: "No space left on device")
    assert [one.level for one in machine.check_temporary()] == ["error"]


def test_differences_are_told_once_a_host_against_the_first() -> None:
    facts = replace(facts_here(), versions=GOOD)
    other = replace(facts, versions={**GOOD, "wandb": "0.30.0"}, python="3.11.99")
    assert list(compare([("a", facts), ("b", facts)])) == []
    found = list(compare([("a", facts), ("b", other), ("b", other)]))
    assert [(one.level, one.host) for one in found] == [("warning", "b")]
    assert found[0].text.startswith("wandb is 0.30.0, expected 0.31.0 as on a")
    with_gpu = replace(facts, gpus=[{"name": "NVIDIA H200"}])
    assert [str(one) for one in compare([("a", with_gpu), ("b", facts)])] == [
        "b: its kind of GPU is none, expected NVIDIA H200 as on a"
    ]
    assert [str(one) for one in clock_skew([("a", 0.0), ("b", 1.9), ("c", -2.5)])] == [
        "c: its clock is 2.5 s behind a's, expected: at most 2 s (run an NTP service on both)"
    ]


def test_a_port_that_is_taken_and_an_address_that_is_not_reached_are_errors(tmp_path: Path) -> None:
    import socket

    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        taken = examine(Request(str(tmp_path), port=port, contact=("127.0.0.1", port)))
    assert [one.text for one in taken.findings if f"port {port}" in one.text] == [
        f"port {port} is taken (Address already in use); expected: free, for the ranks to meet (else --master_port)"
    ]
    refused = examine(Request(str(tmp_path), port=port, contact=("127.0.0.1", port)))
    lines = [one.text for one in refused.findings if one.level == "error"]
    assert len(lines) == 1 and lines[0].startswith(f"127.0.0.1 port {port} cannot be reached: Connection refused")


def test_numbers_are_told_shortly() -> None:
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
    assert (told_rate(1.24e9), told_rate(95e6), told_rate(1.5e6)) == ("1.2 GB/s", "95 MB/s", "1.50 MB/s")
    assert [space.told_bytes(n) for n in (64 << 20, 1_500_000_000, 2_000_000_000_000)] == ["67 MB", "1.5 GB", "2 TB"]
    assert machine.extensions_directory().is_absolute()
