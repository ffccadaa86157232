"""What is said of sources that answer something odd: one line, and what it is."""

from __future__ import annotations

import socket
import threading

import pytest

from clap_zero.data import sources
from clap_zero.data.places import ReadPolicy
from clap_zero.errors import DataError


def test_a_server_that_speaks_no_http_is_one_line():
    """The parser of aiohttp says 400, which the server never did, in several lines."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(4096)
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nbad header\x00: x\r\n\r\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}/train/sizes.json"
        with pytest.raises(DataError, match="what the server sends is no HTTP: ") as caught:
            sources.exists(url, ReadPolicy(retries=0, timeout_s=5))
        server.shutdown(socket.SHUT_RDWR)
    thread.join(5)
    assert "\n" not in str(caught.value) and "400" not in str(caught.value)
