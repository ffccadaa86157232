"""Resident memory of this process: now, at its peak, and with the peak counted anew. Light, and true for children."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident_bytes() -> int:
    """What is resident now; the peak so far where there is no /proc."""
    return _field("VmRSS")


def peak_bytes() -> int:
    """The most that was resident at one time since the start of the process or since `forget_peak`."""
    return _field("VmHWM")


def forget_peak() -> None:
    """Lets the kernel's peak start anew (proc(5), clear_refs); without /proc the peak stays that of the process."""
    if _CLEAR.exists():
        _CLEAR.write_text("5")


def _field(name: str) -> int:
    """A line of /proc/self/status, in bytes. getrusage gives a child its parent's peak where that was more."""
    if not _STATUS.exists():
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(name + ":"))
    return int(line.split()[1]) * 1024
