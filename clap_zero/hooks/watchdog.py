"""A thread that notices what the main thread cannot while it waits in a collective: signals, and the death of others.

Python runs a signal handler only when the main thread comes back from C, so the byte on a pipe is what counts. What
happens to the other ranks comes from the hub (clap_zero.distributed.hub), which this thread polls, and before the
ranks have met from its lobby. Light at import: it begins before all that takes time.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from clap_zero.data.processes import remove_leftovers
from clap_zero.distributed import hub
from clap_zero.distributed.beat_keeper import STACK_SIGNAL, BeatKeeper
from clap_zero.distributed.hub_judge import CLOSE_GRACE_S, LONG_FACTOR, Verdict
from clap_zero.distributed.hub_station import LEAVE_AFTER_S, Settings, Station
from clap_zero.distributed.lobby import Lobby
from clap_zero.distributed.place import (
    describe_process,
    meeting_address,
    report_exit_code,
    speaks_for_host,
    was_launched,
)
from clap_zero.errors import LaunchError
from clap_zero.launching.ancestors import launcher_ancestors
from clap_zero.phases import current, progress

if TYPE_CHECKING:
    from clap_zero.config.schema import DistributedSection
    from clap_zero.distributed.world import World

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
POLL_S = 0.4
STOP_GRACE_S = 30.0
"""How long a rank that a signal asked to stop may stand still without its launcher; saving is no standing still."""

LONGEST_STOP_S = 2400.0
"""How long it may go on in all, where `distributed.hang_timeout_s` says nothing."""

SAME_INTERRUPT_S = 1.0
"""Two SIGINTs within so long are one Ctrl-C: a terminal sends it to all, and a launcher hands it on."""

LAST_WORDS_S = 2.0
"""How long printing may take: an output that nobody reads must not keep a rank alive."""

_stderr: int | None = None
"""This process's standard error, whatever becomes of descriptor 2: DeepSpeed's import turns that away for moments."""


class Watchdog:
    """Remembers the first signal; ends the process at a second Ctrl-C, or when the launcher or a rank has died."""

    def __init__(self, *, parent: int) -> None:
        """Args:
        parent: The process that started this one, as it was when this one began.
        """
        self._signal: str | None = None
        self._signal_time = self._stop_time = 0.0
        self._interrupted: float | None = None
        self._stop_progress = -1
        self._longest_stop_s = LONGEST_STOP_S
        self._ancestors = launcher_ancestors(parent) if was_launched() else []
        self._lobby: Lobby | None = None
        self._station: Station | None = None
        self._abandoned: Station | None = None
        self._verdict: Verdict | None = None
        self._verdict_time = 0.0
        self._keeper: BeatKeeper | None = None
        self._thread = threading.Thread(target=self._watch, name="clap_zero-watchdog", daemon=True)
        self._pipe: tuple[int, int] | None = None

    def start(self) -> Watchdog:
        """Start to watch the launcher, and the ranks until they have met."""
        _keep_stderr()
        self._lobby = hub.enter_lobby(_print)
        self._thread.start()
        return self

    def take_signals(self) -> Watchdog:
        """From now on a signal asks for a checkpoint, and ends nothing. Main thread only."""
        read_end, write_end = os.pipe()
        for end in (read_end, write_end):
            os.set_blocking(end, False)
        self._pipe = (read_end, write_end)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        for number in SIGNALS:
            # nohup has a run ignore that its terminal is gone; so it stays.
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda *_: None)
        return self

    def stop_requested(self) -> str | None:
        """Name of the signal that asked this process to stop, None without one."""
        return self._signal

    def watch_ranks(self, world: World, *, limits: DistributedSection, run_dir: Path) -> None:
        """Watch the other ranks from now on, and be watched. Collective: all ranks must call.

        Args:
            world: The ranks; nothing happens in a job of one.
            limits: How patient to be.
            run_dir: Directory of the run; stacks go to RUN/stacks when it hangs.
        """
        from clap_zero.distributed.collectives import Board, all_gather_objects  # torch, which is there by now

        if world.size == 1:
            return
        if limits.hang_timeout_s is not None:
            self._longest_stop_s = LONG_FACTOR * limits.hang_timeout_s
        settings = Settings(
            rank=world.rank,
            size=world.size,
            host=socket.gethostname(),
            heartbeat_timeout_s=limits.heartbeat_timeout_s,
            hang_timeout_s=limits.hang_timeout_s,
            stacks=run_dir / "stacks",
        )
        # Not by what the launcher says of this host: without its variables all ranks would count as being on one.
        one_host = len(set(all_gather_objects(socket.gethostname()))) == 1
        self._station = hub.open_hub(settings, board=Board(), address=meeting_address(), one_host=one_host, warn=_print)
        if self._station is not None and limits.heartbeat_timeout_s is not None:
            self._keeper = _keeper(limits.heartbeat_timeout_s)
        if self._lobby is not None:
            self._lobby.leave()

    def _watch(self) -> None:
        while True:
            self._wait()
            self._read_signals()
            gone = next((pid for pid, is_alive in self._ancestors if not is_alive()), None)
            # Ctrl-C takes the `deepspeed` command with it: the ranks still finish their step and save.
            if gone is not None and not self._is_stopping():
                reason = f"the launcher (process {gone}) is gone"
                for there in (self._lobby, self._station):
                    if there is not None:
                        there.say({"failing": f"in {current()}: {reason}"})
                        there.flush()
                _leave(f"{reason}, so this rank ends")
            if self._lobby is not None:
                self._obey_lobby(self._lobby)
            if self._station is not None:
                self._obey(self._station)

    def _is_stopping(self) -> bool:
        """Whether this rank still finishes its step and saves, after a signal; as long as that gets on."""
        if self._signal is None:
            return False
        now, seen = time.monotonic(), progress()
        if seen != self._stop_progress or current().phase == "checkpoint":
            self._stop_progress, self._stop_time = seen, now
        return now < min(self._stop_time + STOP_GRACE_S, self._signal_time + self._longest_stop_s)

    def _wait(self) -> None:
        """Let POLL_S pass, or hear of the other ranks earlier."""
        if self._keeper is not None:
            self._keeper.beat()
        station = self._station
        if self._lobby is not None:
            self._ask_lobby(self._lobby, 0 if station is not None else POLL_S)
        elif station is None:
            time.sleep(POLL_S)
        if station is None:
            return
        try:
            verdict = station.poll(POLL_S)
        except Exception as error:  # noqa: BLE001
            # The boundary of the watch: whatever is wrong with it, the run is well and goes on without.
            self._abandon(station, f"{type(error).__name__}: {error}")
            return
        if verdict is not None and self._verdict is None:
            self._verdict, self._verdict_time = verdict, time.monotonic()
            if station.failing is None:
                self._tell(station, verdict)

    def _ask_lobby(self, lobby: Lobby, timeout_s: float) -> None:
        try:
            verdict = lobby.poll(timeout_s)
        except Exception as error:  # noqa: BLE001
            # As below: without it, too, the ranks can meet.
            _print(f"clap_zero: warning: this rank is watched only after all have met: {type(error).__name__}: {error}")
            self._lobby = None
            lobby.leave()
            with contextlib.suppress(OSError, ValueError):
                lobby.close()  # kept open and unread, the connection would break one day: a death to the others
            return
        if verdict is not None and self._verdict is None:
            self._verdict, self._verdict_time = verdict, time.monotonic()
            if self._station is not None:  # most have left the lobby
                self._station.say({"verdict": verdict.cause, "rank": verdict.rank})
                self._station.flush()
                if self._station.failing is None:
                    self._tell(self._station, verdict)
        if lobby.is_over:
            lobby.close()
            self._lobby = None

    def _obey_lobby(self, lobby: Lobby) -> None:
        """End this rank when the job has ended before all have met, unless it has an error of its own."""
        if self._verdict is None or self._station is not None or lobby.failing is not None:
            return
        if lobby.may_leave(time.monotonic() - self._verdict_time):
            self._tell(lobby, self._verdict)
            _leave(None)

    def _abandon(self, station: Station, reason: str) -> None:
        self._station, self._abandoned = None, station
        hub.close_hub()
        _print(f"clap_zero: warning: {describe_process()} and the others watch each other no longer: {reason}")
        with contextlib.suppress(OSError, ValueError):
            station.abandon()

    def _tell(self, station: Station | Lobby, verdict: Verdict) -> None:
        """Print the verdict at once: what ends with a collective may end this process before it leaves by itself."""
        # Rank 0 speaks for all. Of a rank 0 that is gone, one rank a host tells.
        rank = station.settings.rank
        if rank == 0 or (not verdict.is_told and (rank == 1 or speaks_for_host())):
            advice = "this run ends" + ("; the last complete checkpoint is intact" if current().step else "")
            cause, _, details = verdict.cause.partition("\n")
            _print(_marked(f"error: {cause}; {advice}{details and chr(10)}{details}"))

    def _obey(self, station: Station) -> None:
        """End this rank when its run is over."""
        now, verdict = time.monotonic(), self._verdict
        if station.failing is not None:
            since, exit_code = station.failing
            if now > since + CLOSE_GRACE_S:
                _leave("closing took too long after the error above", exit_code=exit_code)
            return
        if verdict is None or now < self._verdict_time + LEAVE_AFTER_S:
            return
        _leave(None)

    def _read_signals(self) -> None:
        if self._pipe is None:
            return
        try:
            received = os.read(self._pipe[0], 64)
        except BlockingIOError:
            return
        for number in received:
            if number not in SIGNALS:
                continue
            name = signal.Signals(number).name
            if self._signal is None:
                self._signal, self._signal_time = name, time.monotonic()
            if number != signal.SIGINT:
                continue
            # One Ctrl-C is often two signals: the terminal's own, and what a launcher makes of it, in any order.
            now, before = time.monotonic(), self._interrupted
            self._interrupted = now if before is None else before
            if before is not None and now > before + SAME_INTERRUPT_S:
                _leave(f"a second {name} ends this rank at once; the last complete checkpoint is intact")


def _leave(reason: str | None, *, exit_code: int = LaunchError.exit_code) -> None:
    """End the process without waiting for anything: the main thread may never come back from a collective.

    Args:
        reason: For people; None where another rank says it.
        exit_code: Of this process.
    """
    end_at_the_latest(LAST_WORDS_S, exit_code=exit_code)
    report_exit_code(exit_code)
    try:
        if reason is not None:
            _print(_marked(reason))
        remove_leftovers()  # or Python's own helpers complain after the line that counts
    finally:
        os._exit(exit_code)


def end_at_the_latest(seconds: float, *, exit_code: int) -> None:
    """End the process after so long, whatever its threads wait for."""

    def end() -> None:
        time.sleep(seconds)
        os._exit(exit_code)

    threading.Thread(target=end, name="clap_zero-leave", daemon=True).start()


def _marked(text: str) -> str:
    where = describe_process()
    return f"clap_zero{f' [{where}]' if where else ''}: {text}"


def _keeper(timeout_s: float) -> BeatKeeper | None:
    """What ends this process when this thread cannot; None where no process can be started."""
    faulthandler.register(STACK_SIGNAL, all_threads=True)
    try:
        return BeatKeeper(timeout_s)
    except OSError as error:
        _print(f"clap_zero: warning: nothing ends this rank if it is stuck outside Python ({error})")
        return None


def _keep_stderr() -> None:
    global _stderr
    if _stderr is not None:
        os.close(_stderr)
    try:
        _stderr = os.dup(sys.stderr.fileno())
    except (OSError, ValueError, AttributeError):  # closed, or no file
        _stderr = None


def _print(text: str) -> None:
    """In a thread of its own: a terminal that is held, or a pipe that nobody reads, must not keep this one."""

    def write() -> None:
        with contextlib.suppress(OSError, ValueError):
            if _stderr is None:
                print(text, file=sys.stderr, flush=True)
            else:
                with open(_stderr, "w", encoding=sys.stderr.encoding, errors="backslashreplace", closefd=False) as out:
                    print(text, file=out)

    writer = threading.Thread(target=write, name="clap_zero-print", daemon=True)
    writer.start()
    writer.join(LAST_WORDS_S / 2)
