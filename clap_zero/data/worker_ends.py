"""How the processes of a loader end before their time, in words that tell what to do."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from clap_zero import oom

_LESS_MEMORY = "lower data.workers or the micro batch, or give the job more memory"

_STATES = {
    "T": "it was stopped by a signal (SIGSTOP)",
    "t": "a debugger has stopped it",
    "D": "it waits for a disk that does not answer",
    "R": "it computes",
    "S": "it waits",
    "Z": "it has ended",
}


class WatchedWorkers:
    """The workers of one loader. Make it before they start: what the kernel kills from then on may be one of them."""

    def __init__(self) -> None:
        self._workers: Sequence[BaseProcess] = ()
        self._kills_before = oom.kernel_kills()

    def watch(self, workers: Sequence[BaseProcess]) -> None:
        """Args:
        workers: the processes, by number; none where the rank builds batches itself.
        """
        self._workers = workers

    def ends(self) -> str:
        """Which workers are gone, how, and the way out; "" where none is.

        A dead worker shows itself by several errors: torch's own, or a broken connection.
        """
        wait([worker.sentinel for worker in self._workers], timeout=0.2)  # the first that ends, of however many
        # One that raised sends its error and then ends as it should, with 0.
        dead = [(number, one) for number, one in enumerate(self._workers) if not one.is_alive() and one.exitcode != 0]
        if not dead:
            return ""
        names = ", ".join(f"{number} (process {worker.pid})" for number, worker in dead)
        code = dead[0][1].exitcode
        return f"worker {names}: {self._how(0 if code is None else code)}"

    def end_stalled(self, *, since_s: float) -> str:
        """Kills workers that live and give nothing: they would not hear that they should end.

        Returns:
            What they did instead.
        """
        states = [
            f"{number} (process {worker.pid}): {_state(worker.pid)}" for number, worker in enumerate(self._workers)
        ]
        for worker in self._workers:
            worker.kill()
        return (
            f"no batch came from the loader's workers for {since_s:.0f} s; worker {'; worker '.join(states)}. Look at "
            "the disks and servers that the shards are on; distributed.hang_timeout_s sets how long is waited"
        )

    def _how(self, code: int) -> str:
        """The end of a worker from its exit code, negative for a signal."""
        if code == -signal.SIGKILL:
            if oom.kernel_kills() > self._kills_before:
                return f"killed by the kernel because memory ran out (SIGKILL): {_LESS_MEMORY}"
            return f"killed by SIGKILL, which is what the kernel sends when memory runs out: {_LESS_MEMORY}"
        if code == -signal.SIGBUS:
            return "killed by SIGBUS: is /dev/shm full? A container's is 64 MB unless told otherwise (--shm-size)"
        if code == -signal.SIGSEGV:
            return "killed by SIGSEGV, in a decoder at the most likely: `clap-zero check` finds the file"
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}: is memory or /dev/shm full?"


def _state(pid: int | None) -> str:
    """What a process does, as the kernel knows it."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "it is gone"
    return _STATES.get(letter, f"state {letter}")
