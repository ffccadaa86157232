"""What a running training tells people. A full disk or a closed pipe under its output costs lines, never the run."""

from __future__ import annotations

import contextlib
from typing import TextIO


def say(text: str, *, file: TextIO | None = None) -> None:
    """Prints a line, or what the output takes of it.

    Args:
        text: the line.
        file: where to; None: standard output.
    """
    # ValueError: the stream is closed, or does not have some character, such as the halves of surrogate pairs in keys.
    with contextlib.suppress(OSError, ValueError):
        try:
            print(text, file=file, flush=True)
        except UnicodeError:
            print(text.encode("ascii", "backslashreplace").decode(), file=file, flush=True)
