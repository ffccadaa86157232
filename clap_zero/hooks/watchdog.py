"""A thread that notices what the main thread cannot while it waits in a collective: signals, and a dead launcher.

Python runs a signal handler only when the main thread comes back from C, so the byte on a pipe is what counts.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from clap_zero.distributed.world import report_exit_code, was_launched
from clap_zero.errors import LaunchError

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
POLL_S = 0.5
STOP_GRACE_S = 30.0
"""How long a rank that a signal asked to stop may go on without its launcher: launchers kill after as much."""


class Watchdog:
    """Remembers the first signal; ends the process at a second Ctrl-C, or when the launcher above it has died."""

    def __init__(self, *, parent: int) -> None:
        """Args:
        parent: The process that started this one, as it was when this one began.
        """
        self._signal: str | None = None
        self._signal_time = 0.0
        self._ancestors = _launcher_ancestors(parent) if was_launched() else []
        self._thread = threading.Thread(target=self._watch, name="clap_zero-watchdog", daemon=True)
        self._pipe: tuple[int, int] | None = None

    def start(self) -> Watchdog:
        """Start to watch. Main thread only."""
        read_end, write_end = os.pipe()
        for end in (read_end, write_end):
            os.set_blocking(end, False)
        self._pipe = (read_end, write_end)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        for number in SIGNALS:
            # nohup has a run ignore that its terminal is gone; so it stays.
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda *_: None)
        self._thread.start()
        return self

    def stop_requested(self) -> str | None:
        """Name of the signal that asked this process to stop, None without one."""
        return self._signal

    def _watch(self) -> None:
        while True:
            time.sleep(POLL_S)
            self._read_signals()
            gone = next((pid for pid, is_alive in self._ancestors if not is_alive()), None)
            # Ctrl-C takes the `deepspeed` command with it: the ranks still finish their step and save.
            stopping = self._signal is not None and time.monotonic() < self._signal_time + STOP_GRACE_S
            if gone is not None and not stopping:
                _leave(f"the launcher (process {gone}) is gone, so this rank ends")

    def _read_signals(self) -> None:
        assert self._pipe is not None
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
            elif number == signal.SIGINT:
                _leave(f"a second {name} ends this rank at once; the last complete checkpoint is intact")


def _leave(reason: str) -> None:
    """End the process without waiting for anything: the main thread may never come back from a collective."""
    report_exit_code(LaunchError.exit_code)
    try:
        print(f"clap_zero: {reason}", file=sys.stderr, flush=True)
    finally:
        os._exit(LaunchError.exit_code)


def _launcher_ancestors(parent: int) -> list[tuple[int, Callable[[], bool]]]:
    """The processes that must live for this one to go on.

    The launcher that is the parent; above DeepSpeed's launch.py also the `deepspeed` command, because launch.py
    survives it. No shell or terminal above those: a run that was sent to the background outlives them.
    """
    watched: list[tuple[int, Callable[[], bool]]] = [(parent, lambda: os.getppid() == parent)]
    if "deepspeed.launcher.launch" in _command_line(parent):
        grandparent = _parent_of(parent)
        if grandparent is not None and "deepspeed" in _command_line(grandparent):
            watched.append((grandparent, lambda: _parent_of(parent) == grandparent))
    return watched


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _parent_of(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The second field is the command in brackets and may hold spaces and brackets itself.
    return int(stat.rpartition(")")[2].split()[1])
