"""The file systems of fsspec, made in the process that uses them and watched over while they work."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import aiohttp
import fsspec
import fsspec.config

from clap_zero.data.places import S3, protocol
from clap_zero.data.source_errors import RangeError
from clap_zero.data.watch import Allowance, Progress, in_thread, wait_for

T = TypeVar("T")

HTTP = ("http", "https")
_CHUNK_BYTES = 1 << 20
_PARTIAL = 206


class Systems:
    """File systems by URL. May be used from several threads.

    Args:
        timeout_s: after which their libraries give up a connection; one that we left behind ends by itself.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._systems: dict[tuple[int, str], fsspec.AbstractFileSystem] = {}

    def of(self, url: str) -> tuple[fsspec.AbstractFileSystem, str]:
        """The file system of a URL, made in this process, and the path in it."""
        name = protocol(url)
        # One for all hosts and buckets where that is possible: connections are kept in it.
        key = os.getpid(), (name if name in (*HTTP, *S3) and "::" not in url else url.rpartition("/")[0])
        with self._lock:
            if key not in self._systems:
                self._systems[key], path = fsspec.core.url_to_fs(url, **self._options(url))
                return self._systems[key], path
        return self._systems[key], self._systems[key]._strip_protocol(url)

    def _options(self, url: str) -> dict[str, Any]:
        """Timeouts of the libraries; the user's own settings win."""
        if "::" in url:
            return {}
        name, timeout_s = protocol(url), self._timeout_s
        options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
        if name in HTTP:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=timeout_s, sock_read=timeout_s)
            # Proxies and .netrc are respected; sizes are those of the file, not of what is compressed on the way.
            client = {"timeout": timeout, "trust_env": True, "headers": {"Accept-Encoding": "identity"}}
            options["client_kwargs"] = {**client, **_configured(name).get("client_kwargs", {})}
        elif name in S3:
            config = {"connect_timeout": timeout_s, "read_timeout": timeout_s, "retries": {"max_attempts": 1}}
            options["config_kwargs"] = {**config, **_configured(name).get("config_kwargs", {})}
        return options


def _configured(name: str) -> dict[str, Any]:
    """What the user's fsspec configuration says about a protocol."""
    return fsspec.config.conf.get(name, {})


def call(
    system: fsspec.AbstractFileSystem,
    method: str,
    *arguments: Any,
    allowed: Allowance,
    progress: Progress | None = None,
    **options: Any,
) -> Any:
    """Calls a method of a file system and watches over it. Asynchronous ones are cancelled, others are left behind.

    Args:
        system: the file system.
        method: name of its method.
        *arguments: what to call it with.
        allowed: how long it may take.
        progress: what comes, where the call tells that.
        **options: what else to call it with.

    Raises:
        StalledError: too little came.
        Exception: whatever the method raises.
    """
    if system.async_impl:
        future = _on_loop(system, getattr(system, f"_{method}")(*arguments, **options))
    else:
        future = in_thread(lambda: getattr(system, method)(*arguments, **options))
    return wait_for(future, progress or Progress(), allowed)


def call_http_part(system: fsspec.AbstractFileSystem, url: str, part: tuple[int, int], allowed: Allowance) -> bytes:
    """Bytes [first, end) of a file by http.

    Raises:
        RangeError: the server does not give parts.
        StalledError: too little came.
    """
    progress = Progress()
    return wait_for(_on_loop(system, _http_part(system, url, part, progress)), progress, allowed)


def _on_loop(system: fsspec.AbstractFileSystem, work: Coroutine[Any, Any, T]) -> Future[T]:
    return asyncio.run_coroutine_threadsafe(work, system.loop)


async def _http_part(system: fsspec.AbstractFileSystem, url: str, part: tuple[int, int], progress: Progress) -> bytes:
    """A part of a file by http. A server without ranges starts to send the whole file, and some send another part than
    they were asked for: its answer is looked at first.

    Raises:
        RangeError: the server does not give parts.
    """
    first, end = part
    session: Any = await system.set_session()
    wanted = {"Range": f"bytes={first}-{end - 1}"}
    async with session.get(system.encode_url(url), headers=wanted) as answer:
        answer.raise_for_status()
        is_asked_for = answer.headers.get("Content-Range", "").startswith(f"bytes {first}-")
        if answer.status != _PARTIAL or not is_asked_for:
            raise RangeError(whole_only=True)
        data = bytearray()
        while len(data) <= end - first and (piece := await answer.content.read(_CHUNK_BYTES)):
            data += piece
            progress.add(len(piece))
    return bytes(data)
