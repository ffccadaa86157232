"""What is read of remote places before training starts: small files, and whether something is there."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING

from clap_zero.data.places import ReadPolicy, shown
from clap_zero.data.source_errors import SourceError
from clap_zero.errors import DataError

if TYPE_CHECKING:
    from clap_zero.data.remote import Remote


def read_text(url: str, policy: ReadPolicy) -> str:
    """A small text file.

    Args:
        url: URL of the file.
        policy: how to read.

    Raises:
        DataError: it cannot be had, or is no UTF-8.
    """
    try:
        return _remote(policy, os.getpid()).read_all(url).decode("utf-8")
    except SourceError as error:
        raise DataError(f"{shown(url)}: {error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{shown(url)} is no UTF-8 text") from error


def exists(url: str, policy: ReadPolicy) -> bool:
    """Whether there is a file at a URL.

    Raises:
        DataError: the source does not answer, or refuses to.
    """
    try:
        _remote(policy, os.getpid()).info(url)
    except SourceError as error:
        if error.absent:
            return False
        raise DataError(f"{shown(url)}: {error}") from error
    return True


def list_names(url: str, policy: ReadPolicy) -> list[str]:
    """Base names of the files in a remote directory, sorted; [] where there is none, or where it cannot be listed.

    Raises:
        DataError: the source does not answer, or refuses to.
    """
    try:
        return _remote(policy, os.getpid()).names(url)
    except SourceError as error:
        raise DataError(f"{shown(url)}: {error}") from error


@functools.lru_cache(maxsize=4)
def _remote(policy: ReadPolicy, pid: int) -> Remote:
    """One for each process: connections do not survive a fork."""
    from clap_zero.data.remote import Remote  # fsspec is loaded only where something remote is read

    return Remote(policy)
