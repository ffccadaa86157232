"""A directory served over HTTP by a real server of this process."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class _Quiet(SimpleHTTPRequestHandler):
    def __init__(self, *arguments: object, asked: Counter[str], directory: str) -> None:
        self.asked = asked
        super().__init__(*arguments, directory=directory)  # type: ignore[arg-type]

    def parse_request(self) -> bool:
        done = super().parse_request()
        self.asked[self.path] += 1
        return done

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def served(directory: Path) -> Iterator[tuple[str, Counter[str]]]:
    """The URL of the directory, and how often each path was asked for."""
    asked: Counter[str] = Counter()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, asked=asked, directory=str(directory)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
