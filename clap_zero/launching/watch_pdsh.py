"""Beside pdsh: notices a host on which DeepSpeed's launch.py could not start, for want of a library that loads.

Then no rank is there that could tell the others, and pdsh waits for these. Nothing is asked of any host before its part
has ended while others go on.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from clap_zero.errors import LaunchError
from clap_zero.launching import leftovers

POLL_S = 3.0
START_S = 120.0
"""pdsh is there by then."""


def watch(hosts: Iterable[str], *, ask: Callable[[str], str | None]) -> None:
    """Watch from a thread of the `deepspeed` command, and end it where a host cannot take part.

    Args:
        hosts: Names as pdsh gets them.
        ask: What keeps launch.py from starting on a host; None where nothing does.
    """
    threading.Thread(target=_watch, args=(set(hosts), ask), name="clap_zero-pdsh", daemon=True).start()


def _watch(hosts: set[str], ask: Callable[[str], str | None]) -> None:
    asked: set[str] = set()
    missed: set[str] = set()
    began, was_there = time.monotonic(), False
    while asked != hosts:
        time.sleep(POLL_S)
        pdsh, there = _under_way(hosts)
        was_there |= pdsh != 0
        if not there:
            if not pdsh and (was_there or time.monotonic() - began > START_S):
                return
            continue
        ended, missed = missed - there - asked, hosts - there
        for host in ended:
            asked.add(host)
            trouble = ask(host)
            if trouble is not None and _under_way(hosts)[1]:
                _end(f"{trouble}; this job ends", pdsh)


def _under_way(hosts: set[str]) -> tuple[int, set[str]]:
    """The process of pdsh, 0 where there is none, and the hosts that it waits for."""
    pdsh = next((pid for pid in _children(os.getpid()) if _words(pid)[:1] == ["pdsh"]), 0)
    words = [_words(pid) for pid in _children(pdsh)] if pdsh else []
    return pdsh, {host for host in hosts if any(host.rpartition("@")[2] in line for line in words)}


def _children(pid: int) -> list[int]:
    """Of all its threads: pdsh has one for each host."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            found += map(int, path.read_text().split())
    return found


def _words(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return []


def _end(text: str, pdsh: int) -> None:
    """End the command; ranks that wait for that host watch it and end, too."""
    print(f"clap_zero: error: {text}", file=sys.stderr, flush=True)
    leftovers.remove_all()
    with contextlib.suppress(OSError):
        os.kill(pdsh, signal.SIGTERM)
    os._exit(LaunchError.exit_code)
