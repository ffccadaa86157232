"""Packing goes on, and ends, whatever becomes of its processes and of single clips."""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest
import soundfile

from clap_zero.data import pack_audio, pack_pool, pack_shared, pack_workers
from clap_zero.data.pack_encoding import Encoded, Encoding
from clap_zero.data.pack_items import Item
from clap_zero.data.pack_workers import Workers
from clap_zero.errors import DataError


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    def late(*_):
        raise TimeoutError(f"not done in {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def work(item: Item, encoding: Encoding, slot: object) -> Encoded:
    """Stands in for the encoder."""
    if item.name.startswith("crowded") and not Path(f"{item.path}.tried").exists():
        # Dies twice: with all, and beside other suspects. Alone it is encoded.
        path = Path(item.path)
        (path.with_name(f"{path.name}.tried") if path.exists() else path).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if item.name.startswith("beside"):
        time.sleep(0.2)
    return Encoded(item, str(os.getpid()).encode())


def test_a_worker_that_is_killed_while_it_waits_does_not_hang_the_pack(monkeypatch):
    monkeypatch.setattr(pack_pool, "_work", work)
    monkeypatch.setattr(pack_pool, "_AHEAD", 1)
    pids: list[int] = []

    def items():
        for number in range(12):
            if number == 6:
                time.sleep(0.5)  # until all that was handed out is done
                os.kill(pids[-1], signal.SIGKILL)
                time.sleep(0.5)
            yield Item("train", f"{number}")

    with within(60):
        for result in pack_pool.encode_all(items(), Encoding(1.0), workers=2):
            pids.append(int(bytes(result.data)))
    assert len(pids) == 12 and pids[-1] not in pids[:6]


def half_an_answer() -> None:
    """Dies like a process that is killed while it writes its answer."""
    frame = inspect.currentframe()
    while frame is not None and "result_queue" not in frame.f_locals:
        frame = frame.f_back
    assert frame is not None
    os.write(frame.f_locals["result_queue"]._writer.fileno(), struct.pack("!i", 1000) + b"half")
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_killed_in_the_middle_of_an_answer_is_noticed(monkeypatch):
    monkeypatch.setattr(pack_workers, "_LOOK_S", 0.3)
    workers = Workers(2)
    with within(60):
        future = workers.submit(half_an_answer)
        workers.wait_for(future)
        assert isinstance(future.exception(), BrokenProcessPool)
        workers.stop()


@pytest.mark.long
def test_items_that_died_beside_others_are_tried_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(pack_pool, "_work", work)
    items = [Item("train", name, str(tmp_path / name)) for name in ("crowded 1", "beside 2", "beside 3", "4", "5", "6")]
    with within(60):
        results = list(pack_pool.encode_all(items, Encoding(1.0), workers=2))
    assert [result.item.name for result in results] == [item.name for item in items]
    assert not any(result.reason for result in results)


@pytest.mark.parametrize("workers", [1, 2])
def test_what_cannot_travel_to_a_worker_or_fails_unforeseen_is_rejected(monkeypatch, workers):
    def broken(data: bytes, **_: object) -> None:
        raise soundfile.LibsndfileError(2, "Error: ")

    monkeypatch.setattr(pack_audio, "load_clip", broken)
    items = [Item("train", "a", audio=b"x", captions=("c",), original={"f": lambda: 0} if workers > 1 else {})]
    [result] = pack_pool.encode_all(items, Encoding(1.0), workers=workers)
    assert result.data is None and result.unexpected and result.reason
    assert ("LibsndfileError" if workers == 1 else "ickl") in result.reason


def test_clip_after_clip_that_fails_unforeseen_ends_the_pack(monkeypatch):
    def full(data: bytes, **_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(pack_audio, "load_clip", full)
    items = [Item("train", f"{n}", audio=b"x", captions=("c",)) for n in range(50)]
    with pytest.raises(DataError, match="21 of 21 clips failed in ways that are hardly theirs, the latest 20: MemoryE"):
        list(pack_pool.encode_all(items, Encoding(1.0), workers=0))
    results = iter(pack_pool.encode_all(items[:20], Encoding(1.0), workers=0))
    assert [result.reason for result in results] == ["MemoryError"] * 20


@pytest.mark.long
def test_memory_held_for_results_after_a_death_stays_bounded(tmp_path, monkeypatch):
    """Suspects are tried as their turn comes, one by one where much lies in memory already."""
    monkeypatch.setattr(pack_pool, "_work", work)
    monkeypatch.setattr(pack_pool, "_AHEAD_BYTES", 2500)
    items = [Item("train", "crowded", str(tmp_path / "x"), audio=bytes(1000))]
    items += [Item("train", f"{n}", audio=bytes(1000)) for n in range(12)]
    with within(90):
        results = list(pack_pool.encode_all(items, Encoding(1.0), workers=2))
    assert len(results) == 13 and all(result.reason is None for result in results[1:])


def test_slots_are_closed_once_and_whatever_is_out():
    slots = pack_shared.Slots(1)
    descriptor = slots._descriptor
    assert descriptor is not None and slots.take() is not None and slots.take() is None
    slots.close()
    slots.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_parent_of_workers_imports_no_torch():
    code = "import sys, clap_zero.data.pack; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
