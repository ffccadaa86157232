"""Where this process stands: the stacks of all threads for a file, the main thread's innermost frames for people."""

from __future__ import annotations

import faulthandler
import sys
import threading
from pathlib import Path

WRITE_TIMEOUT_S = 3.0
"""A file system that does not answer is often the reason of a hang: nobody waits longer for it."""

MOST_FRAMES = 8

_WAITING_IN = ("torch/distributed/", "deepspeed/comm/", "deepspeed/runtime/", "clap_zero/distributed/collectives.py")
"""Code in which a rank stands while it waits for the others."""


def write_stacks(path: Path, *, timeout_s: float = WRITE_TIMEOUT_S) -> bool:
    """Writes the stacks of all threads, in a thread of its own.

    Returns:
        Whether the file was written in time.
    """
    written = threading.Event()

    def write() -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("w") as file:
                faulthandler.dump_traceback(file, all_threads=True)
        except OSError:
            return
        written.set()

    threading.Thread(target=write, name="clap_zero-stacks", daemon=True).start()
    return written.wait(timeout_s)


def innermost_frames() -> tuple[str, bool]:
    """The main thread's innermost frames, innermost last, and whether it waits for other ranks there.

    No line of source is read: that could wait for a file system, too.
    """
    ident = threading.main_thread().ident
    frame = sys._current_frames().get(ident) if ident is not None else None
    lines: list[str] = []
    waits = False
    while frame is not None and len(lines) < MOST_FRAMES:
        code = frame.f_code
        waits |= len(lines) < 4 and any(part in code.co_filename for part in _WAITING_IN)
        lines.append(f"  {_short(code.co_filename)}:{frame.f_lineno} in {code.co_name}")
        frame = frame.f_back
    return "\n".join(reversed(lines)), waits


def _short(path: str) -> str:
    """A path from the package's name on."""
    for mark in ("/site-packages/", "/dist-packages/"):
        if mark in path:
            return path.rpartition(mark)[2]
    parts = Path(path).parts
    return str(Path(*parts[parts.index("clap_zero") :])) if "clap_zero" in parts else path
