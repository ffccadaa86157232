from __future__ import annotations

import os
import subprocess
import sys

import pytest

from clap_zero.launching import command


def test_a_rank_finds_the_command_that_it_belongs_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(command.VARIABLE, "")
    command.mark()
    program = "from clap_zero.launching import command; print(command.take_mark()[0])"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == str(os.getpid())
    found = command.take_mark()
    assert found is not None and found[0] == os.getpid() and command.is_alive(*found)
    assert command.take_mark() is None, "a job that a rank submits would be taken for the command's"


def test_a_command_that_has_ended_is_gone_before_anybody_waits_for_it() -> None:
    process = subprocess.Popen(["sleep", "60"])
    began = command._began(process.pid)
    assert command.is_alive(process.pid, began) and not command.is_alive(process.pid, began + "0")
    process.kill()
    while command.is_alive(process.pid, began):
        pass
    process.wait()


@pytest.mark.parametrize(
    "value", ["", "elsewhere:{space}:1:5", "1:5", "{host}:1:5", "{host}:{space}:x:5", "{host}:0:1:5"]
)
def test_what_cannot_be_seen_from_here_is_not_watched(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(command.VARIABLE, value.format(host=command.socket.gethostname(), space=command._namespace()))
    assert command.take_mark() is None


def test_a_command_that_ended_before_the_rank_began_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import os; from clap_zero.launching import command; command.mark(); print(os.environ[command.VARIABLE])"
    mark = subprocess.check_output([sys.executable, "-c", program], text=True).strip()
    monkeypatch.setenv(command.VARIABLE, mark)
    found = command.take_mark()
    assert found is not None and not command.is_alive(*found)
