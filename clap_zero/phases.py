"""What this process is doing at the moment: one of a few phases of the run, and the step.

Error lines, the watchdog and the beats that ranks send each other read it. Only the main thread writes, by assigning
one tuple, so that any other thread may read at any time. Light: it is imported before everything else.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

PHASES = (
    *("start", "imports", "rendezvous", "preflight", "model", "engine"),
    *("data", "forward", "backward", "optimizer", "metrics"),
    *("checkpoint", "evaluation", "end"),
)
"""In the order of a run. `metrics`: the ranks exchange the figures of a step and the hooks write them down."""

_RAISED_AT = "_clap_zero_raised_at"


class Moment(NamedTuple):
    """Where a process is.

    Attributes:
        phase: One of PHASES.
        step: Optimizer step under way, 0 before the first.
        since: `time.monotonic()` at which the phase began.
    """

    phase: str
    step: int
    since: float

    def __str__(self) -> str:
        return f"{self.phase} of step {self.step}" if self.step else self.phase


def _process_began() -> float:
    """`time.monotonic()` at which this process was made: the interpreter's own start counts, too."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()  # the name before may hold spaces
        ticks = int(fields[19])
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return time.monotonic()  # not Linux: from this import on
    return time.monotonic() - max(0.0, age_s)


class _WorkClock:
    """Seconds that the thread which made it has computed, or was ready to and waited for a core.

    It stands still where the thread sleeps: in a collective that waits for another rank. On a core that is shared it
    goes on all the same, because whoever waits for this rank waits for that, too.
    """

    def __init__(self) -> None:
        try:
            self._file: int | None = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._file = None  # a kernel without it: then only what was computed

    def __call__(self) -> float:
        if self._file is None:
            return time.thread_time()
        ran_ns, waited_ns, _ = os.pread(self._file, 96, 0).split()
        return (int(ran_ns) + int(waited_ns)) * 1e-9


BEGAN = _process_began()
"""`time.monotonic()` at which this process began."""

_work_clock = _WorkClock()
_moment = Moment("start", 0, BEGAN)
_progress = 0
_spent: dict[str, float] = {}
_worked: dict[str, float] = {}
_worked_until = _work_clock()


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Says that what follows is this phase; the one around it goes on afterwards. Main thread only.

    Args:
        name: One of PHASES.
    """
    assert name in PHASES, name
    outer = _moment.phase
    _change(name, _moment.step)
    try:
        yield
    except BaseException as error:
        # Whoever reports it does so outside; the innermost phase is the one that tells.
        error.__dict__.setdefault(_RAISED_AT, _moment)
        raise
    finally:
        _change(outer, _moment.step)


def set_step(step: int) -> None:
    """Says which optimizer step (1-based) is under way. Main thread only."""
    _change(_moment.phase, step)


def advance() -> None:
    """Says that a long phase gets on. Main thread only."""
    _change(_moment.phase, _moment.step)


def current() -> Moment:
    """What the process is doing now."""
    return _moment


def raised_at(error: BaseException) -> Moment:
    """What the process was doing when an error, or the one that it came from, was raised."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    # The oldest: an error may be turned into another one farther out.
    return next((one.__dict__[_RAISED_AT] for one in reversed(chain) if _RAISED_AT in one.__dict__), _moment)


def progress() -> int:
    """A counter that rises with each change of phase or step: what stands still for long has hung."""
    return _progress


def spent() -> dict[str, float]:
    """Seconds by phase since the process began; a phase inside another counts for itself only."""
    now = time.monotonic()
    moment, result = _moment, dict(_spent)
    result[moment.phase] = result.get(moment.phase, 0.0) + now - moment.since
    return result


def worked() -> dict[str, float]:
    """Seconds of `spent` in which the main thread computed, by phase, without its waits for other ranks. It must call.

    What a GPU computes meanwhile does not count.
    """
    return {**_worked, _moment.phase: _worked.get(_moment.phase, 0.0) + _work_clock() - _worked_until}


def _change(name: str, step: int) -> None:
    global _moment, _progress, _worked_until
    now, worked_until = time.monotonic(), _work_clock()
    _spent[_moment.phase] = _spent.get(_moment.phase, 0.0) + now - _moment.since
    _worked[_moment.phase] = _worked.get(_moment.phase, 0.0) + worked_until - _worked_until
    _worked_until = worked_until
    _moment = Moment(name, step, now)
    _progress += 1
