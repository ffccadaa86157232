from __future__ import annotations

import json
import socket

import pytest

from clap_zero.distributed.hub_messages import MAX_LINE_BYTES, MAX_UNSENT_BYTES, Line, ProtocolError, number_of, text_of


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    line = Line(ours)
    yield line, theirs
    line.close()
    theirs.close()


def test_lines_come_whole_however_they_are_cut(pair) -> None:
    line, other = pair
    whole = json.dumps({"phase": "data", "text": "ä" * 3000}).encode() + b'\n{"step": 3}\n{"st'
    got = []
    for start in range(0, len(whole), 700):
        other.sendall(whole[start : start + 700])
        got += line.receive()
    assert got == [{"phase": "data", "text": "ä" * 3000}, {"step": 3}]
    other.sendall(b'ep": 4}\n')
    other.close()
    assert line.receive() == [{"step": 4}] and line.closed, "what came before the end is heard"


@pytest.mark.parametrize(
    "junk", [b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b"\xff\xfe\n", b"[" * 60_000 + b"\n", b"x" * (MAX_LINE_BYTES + 9)]
)
def test_what_no_rank_sends_is_refused(pair, junk: bytes) -> None:
    line, other = pair
    other.settimeout(5)
    other.sendall(junk)
    with pytest.raises(ProtocolError):
        for _ in range(4):
            line.receive()


def test_a_side_that_reads_nothing_blocks_nobody(pair) -> None:
    line, _ = pair
    for _ in range(2 * MAX_UNSENT_BYTES // 10_000 + 100):
        line.send({"text": "x" * 10_000})
    assert not line.closed and len(line._unsent) <= MAX_UNSENT_BYTES + 10_100


def test_a_reset_is_an_end(pair) -> None:
    line, other = pair
    other.close()
    line.send({"a": 1})
    line.send({"a": 1})
    assert line.receive() == [] and line.closed
    line.send({"a": 1})  # nothing happens any more


def test_fields_are_what_they_should_be_or_a_default() -> None:
    message = {"text": "a\x1b[2Jb\nc", "long": "x" * 9000, "step": 3, "flag": True, "none": None}
    assert text_of(message, "text") == "a?[2Jb\nc" and len(text_of(message, "long")) == 4000
    assert text_of(message, "step") == "" and number_of(message, "step") == 3
    assert number_of(message, "flag", default=-1) == -1 and number_of(message, "none") == 0
