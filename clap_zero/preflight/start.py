"""Starting ranks for the doctor, and leaving none behind."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess

from clap_zero.errors import LaunchError

RANKS_WAIT_S = 600.0
_END_WAIT_S = 10.0


def start_ranks(words: list[str], environment: dict[str, str]) -> None:
    """Starts ranks that compare themselves and send known numbers; their table goes to this output.

    Raises:
        LaunchError: They did not come together, or saw something wrong; their own lines stand above.
    """
    print(f"starting ranks: {shlex.join(words)}", flush=True)
    try:
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, env=environment, start_new_session=True)
    except OSError as error:
        raise LaunchError(f"{words[0]} cannot be started: {error.strerror or error}") from error
    try:
        code = process.wait(RANKS_WAIT_S)
    except subprocess.TimeoutExpired:
        raise LaunchError(f"the ranks did not end within {RANKS_WAIT_S:.0f} s: they cannot reach each other") from None
    finally:
        if process.poll() is None:
            _end_group(process)
    if code != 0:
        raise LaunchError(f"the ranks ended with {code}; what they saw stands above")


def _end_group(process: subprocess.Popen) -> None:
    """Ends a launcher with all that it started: asked first, so that it ends what runs on other hosts."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_WAIT_S)
