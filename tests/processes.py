"""Processes that tests look for, any of which may end between two looks."""

from __future__ import annotations

import psutil


def words_of(process: psutil.Process) -> list[str]:
    """A process's command line; nothing of one that has ended, waited for or not."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def command_of(process: psutil.Process) -> str:
    """A process's command line in one string."""
    return " ".join(words_of(process))
