"""Where shards may lie: what a path or URL is, how it is shown to people, and the settings of reading.

Nothing here opens anything. What is shown (messages, keys, logs) never holds credentials: no user part, no query of a
URL, no arguments of a command but the names of tars.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import unquote

from clap_zero.errors import DataError

PIPE = "pipe:"
S3 = ("s3", "s3a")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(?:://|::)")
_FILE = ("file://", "local://")
_QUERIED = re.compile(r"(?:https?|az|abfss?)://")
_USER = re.compile(r"(://)[^/\s'\"]*@")
_QUERY = re.compile(r"(://[^\s?'\"<>]*)\?[^\s'\"<>]*")
_FILES = (".tar", ".npy", ".json")


@dataclass(frozen=True)
class ReadPolicy:
    """How shards are read that do not lie on this machine.

    Attributes:
        cache_dir: where downloaded shards are kept; None is ~/.cache/clap_zero/shards.
        cache_bytes: size of the cache at most.
        timeout_s: a source that gives (nearly) nothing for so long has stalled.
        retries: how often a request that failed is made again.
        allow_pipe: whether `pipe:COMMAND` is run.
        missing: what a shard is that cannot be had in the end: the end of the run, or a lot of bad samples.
        fetch_s: a read that is not done after so long, all attempts together, has failed, however steadily bytes come:
            other ranks wait for it, by default for up to 1,800 s (distributed.timeout_s).
    """

    cache_dir: str | None = None
    cache_bytes: int = 100_000_000_000
    timeout_s: float = 60
    retries: int = 4
    allow_pipe: bool = False
    missing: Literal["stop", "skip"] = "stop"
    fetch_s: float = 900

    @property
    def cache_path(self) -> Path:
        """The cache directory."""
        return Path(absolute(self.cache_dir or "~/.cache/clap_zero/shards"))


def absolute(path: str) -> str:
    """An absolute path, with the home directory in the place of ~; links are not followed, as keys show names.

    Raises:
        DataError: nobody knows that home directory.
    """
    try:
        return os.path.abspath(Path(path).expanduser())  # noqa: PTH100
    except RuntimeError as error:
        raise DataError(
            f"{path}: no such home directory is known: write the path in full (that of the cache is data.cache_dir)"
        ) from error


def is_pipe(path: str) -> bool:
    """Whether this is `pipe:COMMAND`."""
    return path.startswith(PIPE)


def is_remote(path: str) -> bool:
    """Whether this is a URL (other than file://) or a pipe; everything else is a path of this machine."""
    return is_pipe(path) or (_SCHEME.match(path) is not None and not path.startswith(_FILE))


def local_path(path: str) -> str:
    """The path of this machine that `path` or file:// URL names."""
    for scheme in _FILE:
        if path.startswith(scheme):
            return unquote(path[len(scheme) :])
    return path


def protocol(url: str) -> str:
    """What stands before ://, for the first file system of a chained URL."""
    return re.split(r"::?", url, maxsplit=1)[0].lower()


def host(url: str) -> str:
    """Scheme and host (or bucket) of a URL, without user: what stalls or fails as one."""
    return "/".join(shown(url).split("/")[:3])


def hide_secrets(text: str) -> str:
    """Text without the user parts and queries of the URLs in it."""
    return _QUERY.sub(r"\1", _USER.sub(r"\1", text))


def shown(path: str) -> str:
    """A name of a path, URL or pipe for messages, keys and cache files: no credentials, the same whatever they are.

    A query that is what tells files apart (the path does not end like a file) is kept as a short hash.
    """
    if is_pipe(path):
        return PIPE + _shown_command(path[len(PIPE) :])
    if not is_remote(path):
        return path
    plain = hide_secrets(path)
    query = path.partition("?")[2]
    if not query:
        return plain
    return plain if plain.endswith(_FILES) else f"{plain}?{hashlib.sha256(query.encode()).hexdigest()[:8]}"


def _shown_command(command: str) -> str:
    """The program and the tars that it names; other arguments may be passwords."""
    words = command.split()
    kept = [word if n == 0 or word.endswith(".tar") else "..." for n, word in enumerate(words)]
    short = [word for n, word in enumerate(kept) if word != "..." or kept[n - 1 : n] != ["..."]]
    return hide_secrets(" ".join(short))


def command_of(path: str) -> list[str]:
    """The program and arguments of a pipe; no shell ever sees them.

    Raises:
        DataError: quotes are not closed, or there is no program.
    """
    try:
        words = shlex.split(path[len(PIPE) :])
    except ValueError as error:
        raise DataError(f"{shown(path)}: the command cannot be split into words: {error}") from error
    if not words:
        raise DataError("pipe: names no command; write for example 'pipe:cat /mnt/shards/0.tar'")
    return words


def join(directory: str, name: str) -> str:
    """The place of a file in a directory, remote or not. A query (a signature for the whole directory) stays behind it.

    Args:
        directory: path or URL.
        name: base name of the file, as a listing or sizes.json has it.

    Raises:
        DataError: the name is not a plain file name; lists of names come from elsewhere and may say anything.
    """
    if not name or "/" in name or "\0" in name or name in (".", ".."):
        raise DataError(f"{shown(directory)}: {name!r} is no file name")
    if not is_remote(directory):
        return os.path.join(local_path(directory), name)  # noqa: PTH118
    base, mark, query = directory.partition("?") if _QUERIED.match(directory) else (directory, "", "")
    if mark or protocol(directory) in ("http", "https"):
        name = name.replace("%", "%25").replace("?", "%3F").replace("#", "%23")
    return f"{base.rstrip('/')}/{name}{mark}{query}"
