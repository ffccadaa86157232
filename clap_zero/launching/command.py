"""Which `deepspeed` command a job belongs to: it tells its ranks, on all hosts, and they end when it is gone.

On the way to other hosts stand pdsh and ssh, which outlive a killed `deepspeed`.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

VARIABLE = "CLAP_ZERO_COMMAND"


def mark() -> None:
    """Leave this process's name in its environment, for the ranks that it starts."""
    pid = os.getpid()
    os.environ[VARIABLE] = f"{socket.gethostname()}:{_namespace()}:{pid}:{_began(pid)}"


def take_mark() -> tuple[int, str] | None:
    """The command that this rank belongs to, taken out of the environment: a job that a rank submits is not its own.

    Returns:
        Its process on this host and when that began, though it may have ended since; None where it is on another host,
        or cannot be seen from here.
    """
    words = os.environ.pop(VARIABLE, "").rsplit(":", 3)
    if len(words) != 4 or words[0] != socket.gethostname() or words[1] != _namespace() or not words[2].isdecimal():
        return None
    return int(words[2]), words[3]


def is_alive(pid: int, began: str) -> bool:
    """Whether a process is still there, and not another one under the same number."""
    return _began(pid) == began != ""


def _namespace() -> str:
    """Within which process numbers mean the same: containers may share the name of their host."""
    try:
        return str(Path("/proc/self/ns/pid").stat().st_ino)
    except OSError:
        return ""


def _began(pid: int) -> str:
    """When a process began, in clock ticks since the machine did; empty for one that has ended or is not to be seen."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
