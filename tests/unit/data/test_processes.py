"""Starting workers: what a user sees who ends one of the processes, or all of them, meanwhile."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.processes import command_of
from tests.unit.data.shard_files import write_split, write_tar

SCRIPT = "import sys; from clap_zero.cli import main; sys.exit(main(sys.argv[1:]))"


@pytest.mark.parametrize("how", ["kill", "interrupt"])
def test_the_end_of_the_server_while_workers_start_is_one_line(tmp_path, how):
    split = write_split(tmp_path / "train", [2, 2])
    words = [sys.executable, "-c", SCRIPT, "check", str(split), "--workers", "2", "--no-index"]
    program = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path.cwd(), process_group=0
    )
    server = wait_for_server(psutil.Process(program.pid))
    if how == "kill":
        server.kill()
    else:  # as the terminal does: to the whole group
        psutil.Process(program.pid).suspend()  # the server first, or it would be told to go before the signal comes
        server.send_signal(signal.SIGINT)
        time.sleep(1)
        psutil.Process(program.pid).resume()
        program.send_signal(signal.SIGINT)
    _, err = program.communicate(timeout=60)
    assert "Traceback" not in err
    if how == "kill":
        assert program.returncode == 3
        assert err == (
            "clap-zero: error: the processes that read data did not start, their server died: was it killed, or is "
            "memory full?\n"
        )
    else:
        assert (program.returncode, err) == (130, "clap-zero: interrupted\n")


def wait_for_server(process: psutil.Process) -> psutil.Process:
    """The fork server of a process, as soon as it is there: it imports for seconds before it starts a worker."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        for child in process.children():
            if "forkserver" in command_of(child):
                return child
        time.sleep(0.01)
    raise AssertionError("no fork server")


def test_an_error_of_the_loader_leaves_no_semaphores(tmp_path):
    """Its traceback holds the workers' queues until the process is gone, without Python's clean-up."""
    write_tar(tmp_path / "train" / "0.tar", [("a.flac", b"junk"), ("a.txt", b"x")])
    script = """
import os, sys
from clap_zero.data.processes import remove_leftovers
from clap_zero.errors import DataError
from tests.unit.data.taking import take
from clap_zero.data.index import load_index
try:
    take(load_index(sys.argv[1:]), 1, workers=2, micro_batch=1)
except DataError as error:
    remove_leftovers()
    os._exit(error.exit_code)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "train")], capture_output=True, text=True, cwd=Path.cwd()
    )
    assert done.returncode == 3
    assert "leaked" not in done.stderr, done.stderr
