"""What a rank says of the error that ends it: one line with its name, host, phase and step, and the way out."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from pathlib import Path

from clap_zero import oom
from clap_zero.errors import ClapZeroError, ConfigError, LaunchError, first_line
from clap_zero.phases import Moment, raised_at

_UNTOLD = ("start", "imports")
"""Phases before anything of the run is there: naming them tells a user nothing."""

_UNTOLD_ALONE = (*_UNTOLD, "rendezvous", "preflight")
"""Likewise in a job of one process: its messages of what was checked need no place."""


@dataclass(frozen=True)
class LastWords:
    """How a rank ends.

    Attributes:
        message: What went wrong, in one line, without who says it.
        line: The whole line; several where several things are wrong.
        details: A traceback for what nobody foresaw, else nothing.
        exit_code: Of the process.
        said_by_others: Whether this rank stays quiet, because another one says the same.
        lost_contact: Whether this rank only noticed that another one is gone.
    """

    message: str
    line: str
    details: str
    exit_code: int
    said_by_others: bool = False
    lost_contact: bool = False


def last_words(error: BaseException, *, process: str, speaks_for_host: bool) -> LastWords:
    """What there is to say of an error that ends this rank.

    Args:
        error: Whatever reached the end of the run.
        process: What to call this process, "" in a job of one.
        speaks_for_host: Whether it says what all ranks of its host know, such as a wrong configuration.
    """
    moment = raised_at(error)
    message, details, exit_code = _explained(error, moment)
    untold = _UNTOLD if process else _UNTOLD_ALONE
    where = ", ".join(part for part in (process, "" if moment.phase in untold else str(moment)) if part)
    speaker = f"clap_zero{f' [{where}]' if where else ''}: error: "
    return LastWords(
        message=message,
        line="\n".join(speaker + line for line in message.split("\n")),
        details=details,
        exit_code=exit_code,
        said_by_others=isinstance(error, ClapZeroError)
        and (error.reported_elsewhere or (isinstance(error, ConfigError) and not speaks_for_host)),
        lost_contact=is_lost_contact(error) or (error.__cause__ is not None and is_lost_contact(error.__cause__)),
    )


def is_lost_contact(error: BaseException) -> bool:
    """Whether an error of a collective says no more than that another rank is gone."""
    text = f"{type(error).__name__} {error}"
    kinds = ("DistBackendError", "DistNetworkError", "DistStoreError")
    signs = ("Connection closed by peer", "Connection reset by peer", "gloo", *kinds)
    return isinstance(error, RuntimeError) and any(sign in text for sign in signs)


def _explained(error: BaseException, moment: Moment) -> tuple[str, str, int]:
    """Message, details and exit code."""
    if isinstance(error, ClapZeroError):
        return str(error), "", error.exit_code
    if oom.is_out_of_memory(error):
        return oom.describe(error, phase=moment.phase), "", 1
    if is_lost_contact(error):
        reason = first_line(error)[:200]
        message = f"lost contact with the other ranks ({reason}); another rank's message has the cause"
        return message, "", LaunchError.exit_code
    if isinstance(error, SystemExit):
        # Nothing in a run leaves this way: the other ranks would wait for this one, and 0 would hide it.
        code = error.code if isinstance(error.code, int) and error.code else 1
        said = "" if isinstance(error.code, int) or error.code is None else f" ({error.code})"
        return f"something called sys.exit({error.code if not said else ''}) in {_place(error)}{said}", "", code
    whole = "".join(traceback.format_exception(error))
    return f"unexpected {type(error).__name__} in {_place(error)}: {first_line(error)[:300]}", whole, 1


def _place(error: BaseException) -> str:
    """The line of code that raised an error."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return "an unknown place"
    path = Path(frames[-1].filename)
    return f"{path.parent.name}/{path.name}:{frames[-1].lineno}"
