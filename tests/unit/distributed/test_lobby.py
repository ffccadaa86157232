"""Both ends of the lobby over real connections, each polled by hand in one process."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from clap_zero import phases
from clap_zero.distributed import lobby as module
from clap_zero.distributed.hub_judge import Verdict
from clap_zero.distributed.hub_station import Settings
from clap_zero.distributed.lobby import Lobby, lobby_port
from clap_zero.hooks.watchdog import Watchdog
from clap_zero.launching import hosts


class Bed:
    """Ranks of one job, each with a thread that polls it as its watchdog would."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self.warnings: list[str] = []
        self.lobbies: dict[int, Lobby] = {}
        self.verdicts: dict[int, Verdict] = {}
        self._gone: set[int] = set()
        self._threads: dict[int, threading.Thread] = {}
        self._is_open = True

    def enter(self, rank: int, *, size: int = 2, mark: str = "job") -> Lobby:
        settings = Settings(rank, size, f"node{rank}", None, None, Path())
        made = Lobby(settings, address="127.0.0.1", port=self.port, mark=mark, warn=self.warnings.append)
        self.lobbies[rank] = made
        self._threads[rank] = threading.Thread(target=self._poll, args=(rank, made), daemon=True)
        self._threads[rank].start()
        return made

    def _poll(self, rank: int, lobby: Lobby) -> None:
        while self._is_open and rank not in self._gone and not lobby.is_over:
            verdict = lobby.poll(0.02)
            if verdict is not None:
                self.verdicts.setdefault(rank, verdict)
        lobby.close()

    def die(self, rank: int) -> None:
        """Let the connections of a rank end without a word."""
        lobby = self.lobbies.pop(rank)
        station, lobby._station = lobby._station, None  # before its thread ends, which would say goodbye
        assert station is not None
        self._gone.add(rank)
        self._threads[rank].join(5)
        station.close()

    def wait(self, condition: Callable[[], Any], *, at_most_s: float = 5) -> bool:
        until = time.monotonic() + at_most_s
        while not condition() and time.monotonic() < until:
            time.sleep(0.02)
        return bool(condition())

    def all_here(self) -> bool:
        return all(
            lobby._station is not None and (rank == 0 or lobby._station.is_welcome)
            for rank, lobby in self.lobbies.items()
        )

    def close(self) -> None:
        self._is_open = False
        for lobby in self.lobbies.values():
            lobby.leave()  # or its opener calls for ever
        time.sleep(0.05)


@pytest.fixture
def bed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bed]:
    monkeypatch.setattr(module, "CALL_PAUSE_S", 0.05)
    made = Bed()
    yield made
    made.close()


def test_a_rank_that_dies_is_named_to_all(bed: Bed) -> None:
    for rank in range(3):
        bed.enter(rank, size=3)
    assert bed.wait(bed.all_here)
    bed.die(2)
    assert bed.wait(lambda: len(bed.verdicts) == 2)
    assert bed.verdicts[0].cause.startswith("rank 2 on node2 died in start without a word")
    assert bed.verdicts[1].cause == bed.verdicts[0].cause and bed.verdicts[1].is_told


def test_the_death_of_rank_0_is_named_with_its_host(bed: Bed) -> None:
    bed.enter(0), bed.enter(1)
    assert bed.wait(bed.all_here)
    bed.die(0)
    assert bed.wait(lambda: 1 in bed.verdicts)
    assert bed.verdicts[1].cause.startswith("rank 0 on node0 died in start without a word")


def test_an_error_reaches_a_rank_0_that_comes_later(bed: Bed) -> None:
    """Hosts do not start at the same time: whoever fails first waits a little."""
    failed = threading.Thread(target=bed.enter(1).fail, args=("in imports: no such library",), kwargs={"exit_code": 1})
    failed.start()
    time.sleep(0.3)
    assert failed.is_alive()
    bed.enter(0)
    failed.join(5)
    assert not failed.is_alive()
    bed.die(1)
    assert bed.wait(lambda: 0 in bed.verdicts)
    assert bed.verdicts[0] == Verdict("rank 1 on node1 failed in imports: no such library", 1, is_told=True)


def test_rank_0_tells_its_error_to_those_who_come_later(bed: Bed) -> None:
    bed.enter(0, size=3), bed.enter(1, size=3)
    assert bed.wait(bed.all_here)
    failed = threading.Thread(target=bed.lobbies[0].fail, args=("in imports: no disk",), kwargs={"exit_code": 1})
    failed.start()
    time.sleep(0.3)
    assert failed.is_alive(), "rank 2 does not know it yet"
    bed.enter(2, size=3)
    failed.join(5)
    assert not failed.is_alive()
    bed.die(0)
    assert bed.wait(lambda: {1, 2} <= set(bed.verdicts))
    assert {bed.verdicts[rank].cause for rank in (1, 2)} == {"rank 0 on node0 failed in imports: no disk"}


def test_nobody_waits_long_for_those_who_never_come(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TELL_S", 0.3)
    before = time.monotonic()
    bed.enter(1).fail("in imports: no disk", exit_code=1)
    assert 0.3 <= time.monotonic() - before < 1


def test_who_has_met_may_end(bed: Bed) -> None:
    """Rank 0 stays until the last has met, and hears of one that dies before."""
    lobbies = [bed.enter(rank, size=3) for rank in range(3)]
    assert bed.wait(bed.all_here)
    for lobby in lobbies[:2]:
        lobby.leave()
    assert bed.wait(lambda: lobbies[1].is_over)
    time.sleep(0.3)
    assert not lobbies[0].is_over and not bed.verdicts
    lobbies[2].leave()
    assert bed.wait(lambda: lobbies[0].is_over and lobbies[2].is_over)
    assert not bed.verdicts


def test_one_that_dies_while_others_have_met_is_noticed(bed: Bed) -> None:
    lobbies = [bed.enter(rank, size=3) for rank in range(3)]
    assert bed.wait(bed.all_here)
    for lobby in lobbies[:2]:
        lobby.leave()
    bed.die(2)
    assert bed.wait(lambda: 0 in bed.verdicts) and bed.verdicts[0].rank == 2


def test_strangers_and_other_jobs_end_nothing(bed: Bed) -> None:
    bed.enter(0)
    other = bed.enter(1, mark="another job")
    assert bed.wait(lambda: bed.lobbies[0]._station is not None)
    for words in (b"GET / HTTP/1.1\r\n\r\n", b'{"hello": 1}\n', b"x" * 200_000, b'{"hello": 7, "token": "job"}\n'):
        with socket.create_connection(("127.0.0.1", bed.port), timeout=5) as stranger, pytest.raises(OSError):
            stranger.sendall(words)
            while stranger.recv(4096):
                pass
            raise ConnectionError("closed in good order")
    time.sleep(0.3)
    assert not bed.verdicts
    assert other._station is None or not other._station.is_welcome
    absent = f"rank 1 never came, or cannot call port {bed.port} (there are ranks on node0)"
    assert bed.lobbies[0].told_absent() == f"; rank 0 on node0 is still in start; {absent}"
    other.leave()
    bed.lobbies.pop(1)
    bed.enter(1)
    assert bed.wait(bed.all_here) and not bed.verdicts


def test_where_the_port_is_taken_the_ranks_are_on_their_own(bed: Bed) -> None:
    with socket.create_server(("127.0.0.1", bed.port)):
        lobby = bed.enter(0)
        assert bed.wait(lambda: bed.warnings)
        assert f"port {bed.port} of this host cannot be listened to" in bed.warnings[0]
        lobby.leave()
        assert bed.wait(lambda: lobby.is_over)


def test_a_rank_on_its_way_is_given_time_to_find_the_same_error(bed: Bed) -> None:
    first, second = bed.enter(0, size=3), bed.enter(1, size=3)
    assert bed.wait(bed.all_here)
    with phases.phase("imports"):
        assert not second.may_leave(19) and second.may_leave(21)
    with phases.phase("rendezvous"):
        assert second.may_leave(0)
        assert not first.may_leave(19), "rank 2 would wait for it"
        bed.enter(2, size=3)
        assert bed.wait(bed.all_here)
        assert first.may_leave(2)


def test_lobbies_are_away_from_usual_ports() -> None:
    ports = [lobby_port(port) for port in range(1, 65536)]
    assert min(ports) > 10_000 and max(ports) < hosts.PORTS.start
    assert lobby_port(29500) not in (17500, lobby_port(29501)), "17500 is a desktop program's"


def test_a_goodbye_is_heard_before_the_connection_ends(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closed with beats unread, a connection is reset, and a goodbye that was lost on its way with it."""
    first, second = bed.enter(0), bed.enter(1)
    assert bed.wait(bed.all_here)
    heard: list[bool] = []
    station = second._station
    assert station is not None
    close = station.close
    monkeypatch.setattr(station, "close", lambda: (heard.append(station.goodbye_heard.is_set()), close()))
    second.leave(), first.leave()
    assert bed.wait(lambda: heard and first.is_over)
    assert heard == [True] and not bed.verdicts


def test_an_address_that_is_no_name_raises_nothing(bed: Bed) -> None:
    lobby = Lobby(Settings(1, 2, "a", None, None, Path()), address="a..b", port=1, mark="", warn=bed.warnings.append)
    time.sleep(0.2)
    assert lobby._opener.is_alive()
    lobby.leave()
    lobby._opener.join(5)
    assert not lobby._opener.is_alive()


def test_a_watch_that_breaks_says_goodbye(bed: Bed) -> None:
    """A connection that is kept and not read breaks one day, which would be a death in the middle of the run."""
    bed.enter(0)
    settings = Settings(1, 2, "node1", None, None, Path())
    lobby = Lobby(settings, address="127.0.0.1", port=bed.port, mark="job", warn=bed.warnings.append)
    while lobby._station is None or not lobby._station.is_welcome:
        lobby.poll(0.02)
    lobby._station.selector.close()
    Watchdog(parent=os.getppid())._ask_lobby(lobby, 0)
    reception = bed.lobbies[0]._station
    assert bed.wait(lambda: reception.is_empty)
    assert not bed.verdicts
