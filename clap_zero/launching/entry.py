"""What a module of ours does first where `deepspeed` may have started it on several hosts."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from clap_zero.launching.arguments import unquote
from clap_zero.launching.environment import restore

READERS = ("clap_zero.train", "clap_zero.preflight.ranks", "clap_zero.testing.shown")
"""The modules that call `given`: words that are not plain reach no other."""


def given(argv: Sequence[str] | None = None) -> list[str]:
    """The arguments as they were typed; the variables that travelled in a private file are taken up.

    To be called before anything is imported that reads the environment.

    Args:
        argv: Command line without the program's name; None takes the process's own.
    """
    restore()
    return unquote(sys.argv[1:] if argv is None else argv)
