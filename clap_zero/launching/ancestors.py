"""The processes above a rank that must live for it to go on."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from clap_zero.launching import command


def launcher_ancestors(parent: int) -> list[tuple[int, Callable[[], bool]]]:
    """The processes that must live for this one to go on.

    The launcher that is the parent, and the `deepspeed` command: launch.py, pdsh and ssh survive it. Where ssh started
    launch.py, the shell that it was given to and what serves the connection, too. No other shell or terminal: a run
    that was sent to the background outlives them.
    """
    watched: list[tuple[int, Callable[[], bool]]] = [(parent, lambda: os.getppid() == parent)]
    if (above_all := command.take_mark()) is not None:
        watched.append((above_all[0], partial(command.is_alive, *above_all)))
    if "deepspeed.launcher.launch" in _command_line(parent):
        grandparent = _parent_of(parent)
        if grandparent is not None and "deepspeed" in _command_line(grandparent):
            watched.append((grandparent, lambda: _parent_of(parent) == grandparent))
            above = _parent_of(grandparent)
            if above is not None and "sshd" in _command_line(above):
                watched.append((above, lambda: _parent_of(grandparent) == above))
    return watched


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _parent_of(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (OSError, UnicodeDecodeError):
        return None
    # The second field is the command in brackets and may hold spaces and brackets itself.
    return int(stat.rpartition(")")[2].split()[1])
