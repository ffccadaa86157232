"""A directory served over HTTP, well behaved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from tests.unit.data.http_server import http_server


@contextmanager
def served(directory: Path) -> Iterator[tuple[str, Counter[tuple[str, str]]]]:
    """The URL of the directory, and how often each (method, path) was asked for."""
    with http_server() as site:
        site.add(directory)
        site.files.update({quote(path): data for path, data in site.files.items()})
        yield site.url, site.requests
