"""`pipe:COMMAND`: a shard that a program writes to its standard output. No shell is run."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import IO, Any

from clap_zero.data.places import command_of, hide_secrets
from clap_zero.data.watch import Allowance, Progress, StallWatch

_CHUNK_BYTES = 1 << 20
_POLL_S = 0.1
_SAID_BYTES = 200
# The kernel ends the program when the thread that started it is gone: a loader worker may be killed at any moment.
# 1 is PR_SET_PDEATHSIG, 9 SIGKILL; it stays set over exec.
_LAUNCHER = (
    "import ctypes, os, sys\n"
    "ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)\n"
    "if os.getppid() != int(sys.argv[1]): sys.exit(1)\n"
    "try: os.execvp(sys.argv[2], sys.argv[2:])\n"
    "except OSError as error: sys.exit(f'{sys.argv[2]}: {error.strerror}')\n"
)


class PipeError(Exception):
    """The program failed; the message says how."""


def run_pipe(path: str, sink: IO[bytes], count: Callable[[int], None], *, allowed: Allowance) -> None:
    """Runs the command of `pipe:COMMAND` and writes what it prints.

    Args:
        path: the pipe.
        sink: takes the output.
        count: is told how many bytes have come.
        allowed: the program is killed, with its process group, when it gives nearly nothing for `timeout_s`, or is not
            done in time.

    Raises:
        PipeError: the program cannot be started, or ends with another code than 0.
        StalledError: it stalled.
        OSError: the output cannot be written.
    """
    command = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *command_of(path)]
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=said, start_new_session=True
        )
        try:
            _copy(process, sink, count, allowed)
            code = _wait(process, allowed)
        finally:
            _kill(process)
        if code != 0:
            said.seek(0)
            words = hide_secrets(said.read(_SAID_BYTES).decode("utf-8", "replace").strip())
            raise PipeError(
                f"the command ended with exit code {code}" + (f": {words.splitlines()[0]}" if words else "")
            )


def _copy(process: subprocess.Popen[bytes], sink: IO[bytes], count: Callable[[int], None], allowed: Allowance) -> None:
    assert process.stdout is not None
    progress = Progress()
    watch = StallWatch(progress, allowed)
    descriptor = process.stdout.fileno()
    poll = select.poll()
    poll.register(descriptor, select.POLLIN | select.POLLHUP)
    while True:
        if poll.poll(1000 * min(_POLL_S, allowed.timeout_s / 4)):
            data = os.read(descriptor, _CHUNK_BYTES)
            if not data:
                return
            sink.write(data)
            progress.add(len(data))
            count(len(data))
        watch.look()


def _wait(process: subprocess.Popen[Any], allowed: Allowance) -> int:
    """The exit code of a program that has closed its output."""
    watch = StallWatch(Progress(), allowed)
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(timeout=min(_POLL_S, allowed.timeout_s / 4))
        watch.look()


def _kill(process: subprocess.Popen[Any]) -> None:
    """Ends the program and all that it started in its group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()
