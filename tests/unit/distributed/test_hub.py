"""Both ends of the hub over real connections, each polled by hand in one process."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clap_zero import phases
from clap_zero.distributed import hub, hub_ends
from clap_zero.distributed.hub_station import Settings, Station
from tests.unit.distributed.hub_bed import Bed


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[Bed]:
    made = Bed(tmp_path)
    yield made
    made.close()


def test_rank_0_knows_where_all_are(bed: Bed) -> None:
    bed.start()
    bed.call(1), bed.call(2)
    with phases.phase("backward"):
        verdicts = bed.rounds(lambda: bed.joined() and bed.center.judge.peers[2].phase == "backward")
    assert not verdicts and bed.joined()
    peer = bed.center.judge.peers[2]
    assert (peer.name, peer.pid, peer.phase) == ("rank 2 on node2", os.getpid(), "backward")


def test_a_rank_that_dies_ends_the_run_everywhere_at_once(bed: Bed) -> None:
    bed.start()
    bed.call(1), bed.call(2)
    bed.rounds(bed.joined)
    bed.outposts.pop(2).close()
    before = time.monotonic()
    verdicts = bed.rounds()
    assert time.monotonic() - before < 1
    assert verdicts[0].cause == verdicts[1].cause
    assert verdicts[0].cause.startswith("rank 2 on node2 died in ")
    assert verdicts[1].is_told and not verdicts[0].is_told


def test_the_death_of_rank_0_is_noticed_by_each_rank_itself(bed: Bed) -> None:
    bed.start()
    bed.call(1)
    bed.rounds(bed.joined)
    bed.center.close()
    bed.center = None
    verdict = bed.rounds(lambda: False, at_most_s=0.3)[1]
    assert verdict.cause.startswith("rank 0 on node0 died in ") and not verdict.is_told


def test_silence_on_either_side(bed: Bed) -> None:
    bed.start(heartbeat_s=0.5)
    quiet = bed.call(1, heartbeat_s=0.5)
    bed.rounds(bed.joined)
    del bed.outposts[1]
    seen = bed.rounds(lambda: False, at_most_s=1.0)
    assert "rank 1 on node1 has not been heard of for 0.5 s" in seen[0].cause
    bed.center, center = None, bed.center
    bed.outposts[1] = quiet
    time.sleep(0.1)
    verdict = bed.rounds(lambda: False, at_most_s=1.0)[1]
    assert verdict.cause == seen[0].cause, "the connection was there all the time, so it has heard"
    center.close()


def test_a_frozen_rank_does_not_take_its_own_sleep_for_the_silence_of_others(bed: Bed) -> None:
    """A call into C that keeps Python from running for 40 s on rank 0, while the others go on."""
    bed.start(), bed.call(1), bed.call(2)
    bed.rounds(bed.joined)
    for station in (bed.center, *bed.outposts.values()):
        station._last_round -= 40
    assert not bed.rounds(at_most_s=0.5)


def test_an_error_is_quoted_and_its_rank_may_end_first(bed: Bed) -> None:
    bed.start(), bed.call(1), bed.call(2)
    bed.rounds(bed.joined)
    failing = bed.outposts[2]
    threading.Thread(target=failing.fail, args=("in data of step 3: no such shard",), kwargs={"exit_code": 3}).start()
    assert not bed.rounds(lambda: bed.center.judge.peers[2].failure)
    assert failing.failing is not None and failing.failing[1] == 3
    bed.outposts.pop(2).close()
    verdicts = bed.rounds()
    assert verdicts[0].cause == verdicts[1].cause == "rank 2 on node2 failed in data of step 3: no such shard"


def test_a_goodbye_is_no_death(bed: Bed) -> None:
    bed.start(), bed.call(1), bed.call(2)
    bed.rounds(bed.joined)
    threading.Thread(target=bed.outposts[2].post, args=({"goodbye": True},)).start()
    bed.rounds(lambda: bed.center.judge.peers[2].goodbye)
    bed.outposts.pop(2).close()
    assert not bed.rounds(at_most_s=0.5)
    threading.Thread(target=bed.center.post, args=({"goodbye": True},)).start()
    bed.rounds(lambda: bed.outposts[1].judge.peers[0].goodbye)
    bed.center.close()
    bed.center = None
    assert not bed.rounds(at_most_s=0.5)


def test_a_hang_writes_the_stacks_of_all_and_ends_all(bed: Bed) -> None:
    bed.start(hang_s=0.3), bed.call(1), bed.call(2)
    with phases.phase("data"):
        verdicts = bed.rounds(lambda: False, at_most_s=4)
    assert set(verdicts) == {0, 1, 2}
    assert "the run hangs: no rank has made progress for " in verdicts[0].cause
    assert sorted(path.name for path in (bed.folder / "stacks").iterdir()) == [f"rank0000{n}.txt" for n in range(3)]
    assert "test_hub.py" in (bed.folder / "stacks" / "rank00002.txt").read_text()


def test_strangers_are_shown_the_door(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_ends, "HELLO_TIMEOUT_S", 0.2)
    bed.start()
    lines = (
        b'{"hello": 1, "token": "wrong"}\n',
        b'{"hello": 1}\n{"verdict": "x"}\n',
        b'{"hello": 99, "token": "secret"}\n',
        b"GET / HTTP/1.1\r\n",
        b"",
    )
    strangers = []
    for line in lines:
        stranger = socket.create_connection(("127.0.0.1", bed.port), timeout=5)
        stranger.sendall(line)
        strangers.append(stranger)
    assert not bed.rounds(at_most_s=0.5) and set(bed.center.judge.peers) == {0}
    for stranger in strangers:
        with stranger:
            assert stranger.recv(10) == b""
    bed.call(1), bed.call(2)
    bed.rounds(bed.joined)
    assert bed.joined()
    first = bed.outposts.pop(1)
    again = bed.call(1)  # a rank number is taken once
    bed.rounds(lambda: again._line.closed)
    assert again._line.closed and bed.joined()
    first.close()


def test_ranks_that_cannot_call_are_named_once(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_ends, "JOIN_TIMEOUT_S", 0.1)
    bed.start(), bed.call(1)
    assert not bed.rounds(at_most_s=0.4)
    assert len(bed.warnings) == 1 and f"rank 2 cannot reach port {bed.port} of this host" in bed.warnings[0]


def test_strangers_that_speak_and_go_at_once_end_nothing(bed: Bed) -> None:
    bed.start(), bed.call(1)
    bed.rounds(bed.joined)
    for line in (b"{}\n", b"x\n", b'{"hello": 2, "token": "wrong"}\n{}\n', b""):
        with socket.create_connection(("127.0.0.1", bed.port), timeout=5) as stranger:
            stranger.sendall(line)
        assert not bed.rounds(at_most_s=0.1)
    bed.call(2)
    assert not bed.rounds(bed.joined) and bed.joined()


def test_a_rank_that_calls_late_is_taken_in(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_ends, "JOIN_TIMEOUT_S", 0.1)
    bed.start(), bed.call(1)
    bed.rounds(lambda: bed.warnings)
    assert bed.center.judge.is_blind
    bed.call(2)
    assert not bed.rounds(at_most_s=0.6) and bed.joined() and not bed.center.judge.is_blind


def test_a_rank_that_is_not_taken_in_is_not_watched_and_lives(bed: Bed) -> None:
    bed.start()
    refused = bed.call(1, token="wrong")
    assert not bed.rounds(at_most_s=0.6)
    assert refused._line.closed and refused.judge.peers[0].unwatched


def test_a_rank_that_watches_no_longer_ends_nobody(bed: Bed) -> None:
    bed.start(heartbeat_s=1.0, hang_s=0.3), bed.call(1, heartbeat_s=1.0), bed.call(2, heartbeat_s=1.0)
    bed.rounds(bed.joined)
    gone = bed.outposts.pop(2)
    gone.abandon()
    assert not bed.rounds(at_most_s=1.5), "neither its silence nor a hang that it may know better about"
    gone.close()
    assert not bed.rounds(at_most_s=0.3), "its end neither"


def test_a_long_error_is_cut_and_no_death(bed: Bed) -> None:
    bed.start(), bed.call(1), bed.call(2)
    bed.rounds(bed.joined)
    threading.Thread(
        target=bed.outposts[2].fail, args=("in preflight: " + "x" * 200_000,), kwargs={"exit_code": 5}
    ).start()
    bed.rounds(lambda: bed.center.judge.peers[2].failure)
    bed.outposts.pop(2).close()
    assert "rank 2 on node2 failed in preflight: xxx" in bed.rounds()[0].cause


def test_strangers_without_end_take_neither_a_core_nor_the_place_of_a_rank(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_ends, "MOST_UNKNOWN", 8)
    bed.start()
    idle = [socket.create_connection(("127.0.0.1", bed.port), timeout=5) for _ in range(30)]
    bed.rounds(at_most_s=0.3)
    before, rounds = time.process_time(), 0
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        bed.center.poll(0.1)
        rounds += 1
    assert rounds < 20 and time.process_time() - before < 0.3
    bed.call(1)
    assert not bed.rounds(bed.joined) and bed.joined()
    for stranger in idle:
        stranger.close()


def test_one_host_is_listened_to_on_its_address_alone(tmp_path: Path) -> None:
    board, settings = Board(), Settings(0, 2, "here", 30, 600, tmp_path)
    center = hub.open_hub(settings, board=board, address="127.0.0.1", one_host=True, warn=print)
    hub.close_hub()
    assert center is not None and center._listener.getsockname()[0] == "127.0.0.1"
    center.close()


class Board:
    """What the store of the process group does."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def put(self, key: str, text: str) -> None:
        self.texts[key] = text

    def get(self, key: str) -> str:
        return self.texts[key]


def opened(rank: int, board: Board, folder: Path, *, address: str = "127.0.0.1", warn: Any = print) -> Station | None:
    settings = Settings(rank, 2, "here", 30, 600, folder)
    try:
        return hub.open_hub(settings, board=board, address=address, one_host=False, warn=warn)
    finally:
        hub.close_hub()


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_the_secret_goes_over_the_board(tmp_path: Path, address: str) -> None:
    board = Board()
    center = opened(0, board, tmp_path, address=address)
    outpost = opened(1, board, tmp_path, address=address)
    assert center is not None and outpost is not None
    for _ in range(3):
        center.poll(0.01), outpost.poll(0.01)
    assert set(center.judge.peers) == {0, 1} and len(json.loads(board.texts["hub"])["token"]) == 64
    outpost.close(), center.close()


def test_without_a_port_the_run_goes_on_with_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> socket.socket:
        raise PermissionError(13, "Permission denied")

    board, warnings = Board(), []
    monkeypatch.setattr(socket, "create_server", refuse)
    assert opened(0, board, tmp_path, warn=warnings.append) is None
    assert len(warnings) == 1 and "Permission denied" in warnings[0]
    assert opened(1, board, tmp_path, warn=warnings.append) is None and len(warnings) == 1
    hub.announce_failure("in data: x", exit_code=3)  # nobody listens, nothing happens
    hub.say_goodbye()
