"""What is said of sources that answer something odd: one line, and what it is."""

from __future__ import annotations

import errno
import socket
import threading

import pytest

from clap_zero.data import sources
from clap_zero.data.places import ReadPolicy
from clap_zero.data.source_errors import explain
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


@pytest.mark.parametrize(
    ("error", "words", "final"),
    [
        (OSError(errno.EINVAL, "Bad Request"), "have the credentials expired", True),
        (OSError(errno.EREMCHG, "Moved Permanently"), "AWS_DEFAULT_REGION", True),
        (OSError(errno.EBUSY, "Service Unavailable"), "Service Unavailable", False),
        (PermissionError(errno.EACCES, "Forbidden"), "access is denied (Forbidden)", True),
        (RuntimeError("400, message:\n  Can not decode"), "400, message: Can not decode", False),
        (RuntimeError("file:///x"), "RuntimeError file:///x", False),
    ],
)
def test_errors_of_libraries_are_told_in_words(error, words, final):
    told = explain(error, "s3://bucket/train/0.tar")
    assert words in str(told) and told.final == final and "Errno" not in str(told) and "\n" not in str(told)


def test_a_bucket_with_a_key_in_its_name_is_not_shown():
    class ParamValidationError(Exception):
        """botocore's, by its name."""

    told = explain(ParamValidationError('Invalid bucket name "AKIA:secret@bucket"'), "s3://AKIA:secret@bucket/x")
    assert told.final and "without credentials" in str(told) and "secret" not in str(told)
