"""A small process beside each rank that ends it when it cannot even run the thread that watches over it.

That is a rank which somebody stopped (SIGSTOP), or which sits in a call into C that never gives Python's lock back.
Nothing inside it can help then, and no launcher looks after it: its signals would not get through.

This file is a program of its own, run without site-packages: `beat_keeper.py FD TIMEOUT_S`.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time

STACK_SIGNAL = signal.SIGUSR2
"""Asks the rank for its stacks (faulthandler writes them without Python's lock)."""

STACKS_S = 1.0
MOST_WATCHED_S = 2.0
"""What one round counts for at the most: when the whole job was suspended, this process was, too."""


class BeatKeeper:
    """The rank's side: starts the process and tells it that all is well."""

    def __init__(self, timeout_s: float) -> None:
        """Args:
        timeout_s: A rank that gives no beat for so long is killed.

        Raises:
            OSError: The process cannot be started.
        """
        read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, str(read_end), str(timeout_s)], pass_fds=(read_end,)
            )
        finally:
            os.close(read_end)

    def beat(self) -> None:
        """To be called much more often than every `timeout_s`."""
        with contextlib.suppress(OSError):  # full, or that process is gone
            os.write(self._write_end, b".")

    def stop(self) -> None:
        """Ends the process."""
        os.close(self._write_end)
        self._process.wait()


def keep(beats: int, *, rank_pid: int, timeout_s: float) -> None:
    """Waits until the rank ends, or ends it.

    Args:
        beats: File descriptor that a byte comes from now and then, and the end when the rank has ended.
        rank_pid: The rank.
        timeout_s: It is killed after so long without a byte.
    """
    silent_s, before = 0.0, time.monotonic()
    while silent_s <= timeout_s:
        ready, _, _ = select.select([beats], [], [], 0.5)
        now = time.monotonic()
        silent_s, before = silent_s + min(now - before, MOST_WATCHED_S), now
        if ready:
            if not os.read(beats, 4096):
                return
            silent_s = 0.0
    with contextlib.suppress(OSError):  # it has ended just now, or the output is gone
        print(
            f"clap_zero: process {rank_pid} does not run for {timeout_s:g} s: stopped, or stuck outside Python; killed",
            file=sys.stderr,
            flush=True,
        )
    if os.getppid() == rank_pid:
        os.kill(rank_pid, STACK_SIGNAL)
        time.sleep(STACKS_S)
    if os.getppid() == rank_pid:
        os.kill(rank_pid, signal.SIGKILL)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # meant for the rank, which takes this process with it
    keep(int(sys.argv[1]), rank_pid=os.getppid(), timeout_s=float(sys.argv[2]))
