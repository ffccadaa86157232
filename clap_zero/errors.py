"""Errors that a user can act on, and the exit code of each kind.

Raise one of these for anything that the user, their files or their machines can cause. The message is one readable
line: what is wrong, where, and the way out. Our own invariants are asserts.
"""

from __future__ import annotations

EXIT_STOPPED = 75
"""Exit code of a run that a signal stopped after its checkpoint was written (EX_TEMPFAIL: run the command again)."""


class ClapZeroError(Exception):
    """Base of all errors with a message for users."""

    exit_code = 1
    reported_elsewhere = False
    """Whether another rank raised it first and says it."""


class ConfigError(ClapZeroError):
    """A flag, the run config or the DeepSpeed JSON is wrong."""

    exit_code = 2


class DataError(ClapZeroError):
    """Shards, audio or captions cannot be used."""

    exit_code = 3


class CheckpointError(ClapZeroError):
    """A checkpoint is missing, incomplete or does not fit this run."""

    exit_code = 4


class LaunchError(ClapZeroError):
    """The ranks could not be started, found or kept together."""

    exit_code = 5


class DivergedError(ClapZeroError):
    """Training left the range of finite numbers and cannot go on."""

    exit_code = 6


def first_line(error: BaseException) -> str:
    """What an error of a library says, as one line; the name of its class where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def one_line(text: str) -> str:
    """Text for a message that holds names of others: line breaks and other control characters are escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
