"""What can go wrong with a source, and what the libraries' errors mean, in words without credentials."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

from clap_zero.data.places import S3, hide_secrets, protocol
from clap_zero.errors import first_line

_ABSENT_STATUS = (404, 410)
_DENIED_STATUS = (401, 403, 407)
_RANGE_STATUS = 416
_TRANSIENT_STATUS = (408, 425, 429)
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_LOCAL = (*_DISK_FULL, errno.EFBIG, errno.EROFS, errno.EMFILE, errno.ENFILE)
_S3_REFUSALS = {  # s3fs knows no more: the answer to a request for a size has no text
    "Bad Request": "have the credentials expired, or is the bucket in another region (AWS_DEFAULT_REGION)?",
    "Moved Permanently": "the bucket is in another region, set AWS_DEFAULT_REGION (or AWS_ENDPOINT_URL)",
}
_EXTRAS = {"s3": "clap-zero[s3]", "s3a": "clap-zero[s3]"}


class SourceError(Exception):
    """A source does not give what it should; the message is the reason, without the URL.

    Attributes:
        final: trying again is of no use.
        absent: there is nothing at this place.
    """

    def __init__(self, reason: str, *, final: bool = False, absent: bool = False) -> None:
        super().__init__(reason)
        self.final, self.absent = final or absent, absent


class RangeError(SourceError):
    """The source has no such part, or gives whole files only (`whole_only`)."""

    def __init__(self, reason: str = "gives whole files only, no parts of them", *, whole_only: bool = False) -> None:
        super().__init__(reason, final=True)
        self.whole_only = whole_only


class TooLargeError(Exception):
    """More bytes come than there is room for."""


def is_disk_full(error: OSError) -> bool:
    """Whether a write failed for lack of space."""
    return error.errno in _DISK_FULL


def is_local(error: BaseException) -> bool:
    """Whether an error is about this machine, not about the source."""
    return isinstance(error, OSError) and error.errno in _LOCAL


def explain(error: BaseException, url: str) -> SourceError:
    """What an error of fsspec or of one of its file systems means.

    Args:
        error: the error.
        url: what was asked for.
    """
    cause = error.__cause__
    if isinstance(error, FileNotFoundError) and cause is not None and _is_of_http(cause):
        return explain(cause, url)  # fsspec calls every failure of a request for a size a missing file
    status = getattr(error, "status", None)
    message = hide_secrets(str(getattr(error, "message", "")).strip().partition("\n")[0].rstrip(": "))
    if isinstance(status, int) and type(cause).__module__ == "aiohttp.http_exceptions":
        # Its parser gave up; the status is the parser's own, 400 for whatever the server sent.
        return SourceError(f"what the server sends is no HTTP: {message}")
    if type(error).__name__ == "TooManyRedirects":
        return SourceError("redirects again and again")
    if isinstance(status, int):
        return _explain_status(status, message)
    if isinstance(error, FileNotFoundError):
        return SourceError("is not there", absent=True)
    words = _words(error)
    if protocol(url) in S3 and words in _S3_REFUSALS:
        return SourceError(f"is refused ({words}): {_S3_REFUSALS[words]}", final=True)
    if isinstance(error, ImportError):
        package = _EXTRAS.get(protocol(url))
        return SourceError(
            f"needs a package that is not installed: pip install '{package}'" if package else words, final=True
        )
    if isinstance(error, PermissionError) or type(error).__name__ == "NoCredentialsError":
        return SourceError(_denied(words), final=True)
    if type(error).__name__ == "ParamValidationError":  # its details may hold what was mistaken for a bucket
        return SourceError("is no valid address: write s3://BUCKET/PATH, without credentials", final=True)
    if isinstance(error, TimeoutError):
        return SourceError("stalled: nothing came for the time of data.remote_timeout_s")
    return SourceError(words, final=isinstance(error, ValueError | NotImplementedError | IsADirectoryError))


def _words(error: BaseException) -> str:
    """What an error says, in one line."""
    words = re.sub(r"^\[Errno \d+\] ", "", hide_secrets(first_line(error)))
    if words.endswith(":"):  # aiohttp says what it is in the next line
        return hide_secrets(" ".join(str(error).split()))[:200]
    # aiohttp gives of some errors the address alone.
    return words if " " in words or isinstance(error, OSError) else f"{type(error).__name__} {words}"


def _is_of_http(error: BaseException) -> bool:
    return type(error).__module__.startswith("aiohttp") or isinstance(error, TimeoutError)


def _explain_status(status: int, message: str) -> SourceError:
    words = f"the server answers {status} {message}".rstrip()
    if status in _ABSENT_STATUS:
        return SourceError(f"is not there ({status})", absent=True)
    if status in _DENIED_STATUS:
        return SourceError(_denied(words), final=True)
    if status == _RANGE_STATUS:
        return RangeError("has no such part")
    return SourceError(words, final=400 <= status < 500 and status not in _TRANSIENT_STATUS)


def _denied(words: str) -> str:
    return f"access is denied ({words}): give this machine credentials, or check the ones that it has"


def free_bytes(directory: Path) -> int:
    """Free space of the file system that holds `directory`."""
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize
