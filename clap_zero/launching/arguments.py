"""Command lines that arrive byte for byte, through pdsh, ssh and the shell on the other side.

pdsh joins all words with spaces, fills in %h, %n and %u, and the shell of the other host reads the rest once more:
quotes, $, braces and empty words do not survive. So the guard of `deepspeed` writes every word that is not plain with
plain characters alone, a byte as `=XX`, behind PREFIX: `This is` becomes `quoted:This=20is`. MARK before the first of
them tells the program to read them back; without it nothing is touched.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

MARK = "--arguments=quoted"
PREFIX = "quoted:"
_PLAIN = re.compile(r"[A-Za-z0-9_@+:,./-][A-Za-z0-9_@+:,./=-]*", re.ASCII)
_KEPT = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_@+:,./-")


def quote(arguments: Sequence[str]) -> list[str]:
    """The same arguments in words that no shell changes; as they are where all are plain."""
    if all(_is_plain(word) for word in arguments):
        return list(arguments)
    return [MARK, *(word if _is_plain(word) else PREFIX + _encode(word) for word in arguments)]


def unquote(arguments: Sequence[str]) -> list[str]:
    """What `quote` was given. A launcher may have put words of its own (`--local_rank=0`) before MARK."""
    words = list(arguments)
    if MARK not in words:
        return words
    place = words.index(MARK)
    return words[:place] + [_decode(word) for word in words[place + 1 :]]


def _is_plain(word: str) -> bool:
    return _PLAIN.fullmatch(word) is not None and not word.startswith((PREFIX, MARK))


def _encode(word: str) -> str:
    return "".join(chr(byte) if byte in _KEPT else f"={byte:02X}" for byte in os.fsencode(word))


def _decode(word: str) -> str:
    if not word.startswith(PREFIX):
        return word
    first, *others = word.removeprefix(PREFIX).split("=")
    data = os.fsencode(first) + b"".join(bytes([int(part[:2], 16)]) + os.fsencode(part[2:]) for part in others)
    return os.fsdecode(data)
