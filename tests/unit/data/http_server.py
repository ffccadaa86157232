"""A real HTTP server on this machine that misbehaves on purpose, file by file."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


@dataclass
class Fault:
    """How a file is served.

    Attributes:
        status: answered to the first `times` requests, instead of the file.
        times: see `status`.
        stall_after: bytes after which nothing comes any more, until the server stops; -1 before the headers.
        cut_after: bytes after which the connection is closed, though more were announced.
        no_ranges: Range is ignored.
        first_range: whatever Range asks for, as many bytes come from the front.
        announced: added to Content-Length; and a Content-Length below the size ends the body there.
        no_length: no Content-Length, the body ends with the connection.
        trickle_s: pause after each byte.
        redirect: path to go to.
        get_only: HEAD is refused.
    """

    status: int = 0
    times: int = 10**9
    stall_after: int | None = None
    cut_after: int | None = None
    no_ranges: bool = False
    first_range: bool = False
    announced: int = 0
    no_length: bool = False
    trickle_s: float = 0.0
    redirect: str = ""
    get_only: bool = False


@dataclass
class Site:
    """What the server has, and what it was asked for.

    Attributes:
        files: bytes by path.
        faults: by path.
        requests: how often each (method, path) was asked for.
        sent: bytes of bodies sent, by path.
        users: the Authorization headers that came.
    """

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    faults: dict[str, Fault] = field(default_factory=dict)
    requests: Counter[tuple[str, str]] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)
    users: list[str] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def add(self, directory: Path, at: str = "/") -> None:
        """Serves the files of a directory."""
        for path in sorted(directory.rglob("*")):
            if path.is_file():
                self.files[at + path.relative_to(directory).as_posix()] = path.read_bytes()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    site: Site

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        site, path = self.site, self.path.partition("?")[0]
        site.requests[self.command, path] += 1
        site.users.append(self.headers.get("Authorization", ""))
        fault, data = site.faults.get(path, Fault()), site.files.get(path)
        seen = site.requests["GET", path] + site.requests["HEAD", path]
        if fault.status and seen <= fault.times:
            self._say(fault.status)
        elif fault.redirect:
            self.send_response(302)
            self.send_header("Location", fault.redirect)
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif data is None:
            self._say(404)
        elif fault.get_only and not body:
            self._say(405)
        else:
            if fault.stall_after == -1 and body:
                site.over.wait(60)
            self._file(path, data, fault, body=body)

    def _say(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _file(self, path: str, data: bytes, fault: Fault, *, body: bool) -> None:
        wanted = self.headers.get("Range", "")
        total, status = len(data), 200
        if wanted.startswith("bytes=") and not fault.no_ranges:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            if int(first) >= total:
                self._say(416)
                return
            if fault.first_range:
                first, last = "0", str(int(last or total - 1) - int(first))
            data, status = data[int(first) : int(last or total - 1) + 1], 206
        self.send_response(status)
        if status == 206:
            self.send_header("Content-Range", f"bytes {first}-{int(first) + len(data) - 1}/{total}")
        if fault.no_length:
            self.close_connection = True
        else:
            self.send_header("Content-Length", str(len(data) + fault.announced))
        self.end_headers()
        if body:
            self._body(path, data if fault.announced >= 0 else data[: fault.announced], fault)

    def _body(self, path: str, data: bytes, fault: Fault) -> None:
        site = self.site
        try:
            if fault.trickle_s:
                for byte in data:
                    self.wfile.write(bytes([byte]))
                    if site.over.wait(fault.trickle_s):
                        return
                return
            ends = [end for end in (fault.stall_after, fault.cut_after) if end is not None]
            self.wfile.write(data[: ends[0]] if ends else data)
            site.sent[path] += len(data[: ends[0]] if ends else data)
            if fault.stall_after is not None:
                site.over.wait(60)
            if ends or fault.announced > 0:
                self.close_connection = True
        except OSError:
            self.close_connection = True  # the reader has left

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@contextmanager
def http_server() -> Iterator[Site]:
    """A server for as long as the context lasts."""
    site = Site()
    handler = type("Handler", (_Handler,), {"site": site})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    site.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield site
    finally:
        site.over.set()
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Fails when its body takes longer."""
    began = time.monotonic()
    yield
    took = time.monotonic() - began
    assert took < seconds, f"took {took:.1f} s"
