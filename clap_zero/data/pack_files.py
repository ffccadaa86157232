"""Reading what users point at: it may be a pipe, a device, gone, unreadable or enormous, under a name of any kind."""

from __future__ import annotations

import math
import os

from clap_zero.audio.kinds import AudioError
from clap_zero.data.regular import NotAFileError, open_regular

_READ_BYTES = 1 << 24


def read_file(path: str, *, max_bytes: int) -> bytes:
    """The bytes of a regular file. Anything else is refused before it can block or go on for ever.

    Args:
        path: the file.
        max_bytes: most that is read.

    Raises:
        AudioError: it cannot be used; the reason does not name the file.
    """
    try:
        descriptor = open_regular(path)
        try:
            return _read_all(descriptor, os.fstat(descriptor).st_size, max_bytes)
        finally:
            os.close(descriptor)
    except NotAFileError as error:
        raise AudioError(f"not a file but {error.kind}") from error
    except (FileNotFoundError, NotADirectoryError) as error:
        raise AudioError("the file is missing") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        # A socket cannot even be opened.
        raise AudioError(f"the file cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _read_all(descriptor: int, size_bytes: int, max_bytes: int) -> bytes:
    """All bytes, whatever size the file system announces: /proc says 0, and a file may grow while it is read."""
    blocks: list[bytes] = []
    total = 0
    while total <= max_bytes and size_bytes <= max_bytes:
        block = os.read(descriptor, max(_READ_BYTES, size_bytes - total + 1))
        if not block:
            return blocks[0] if len(blocks) == 1 else b"".join(blocks)
        blocks.append(block)
        total += len(block)
    raise AudioError(f"the file is larger than {max_bytes} bytes")


def readable(name: str) -> str:
    r"""A file name as text that can be printed and stored: bytes that are no UTF-8 become `\xNN`."""
    try:
        return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    except UnicodeEncodeError:  # no name of a file: json can hold any half of a surrogate pair
        return name.encode("utf-8", "backslashreplace").decode("utf-8")


def plain(value: object) -> object:
    """A value that is JSON for every reader: no NaN, no lone surrogates, no types that JSON lacks.

    Raises:
        RecursionError: it is nested too deeply.
    """
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(plain(str(key))): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return plain(str(value))
