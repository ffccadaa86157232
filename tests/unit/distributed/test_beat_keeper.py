"""The process beside a rank, with a rank that is a plain sleeping process."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

RANK = """
import faulthandler, os, sys, time
from clap_zero.distributed.beat_keeper import STACK_SIGNAL, BeatKeeper
faulthandler.register(STACK_SIGNAL, all_threads=True)
keeper = BeatKeeper(1.0)
print(keeper._process.pid, flush=True)
how = sys.argv[1]
for _ in range(20 if how == "beats" else 3):
    keeper.beat()
    time.sleep(0.1)
if how == "stops":
    os.kill(os.getpid(), 19)
def stuck():
    import ctypes
    while True:  # the question for the stacks wakes it up
        ctypes.PyDLL(None).sleep(60)
if how == "stuck":
    stuck()
"""


@pytest.mark.parametrize(
    ("how", "code"),
    [
        pytest.param("beats", 0, marks=pytest.mark.long),
        pytest.param("stops", -9, marks=pytest.mark.long),
        ("stuck", -9),
    ],
)
def test_only_a_rank_that_does_not_run_is_killed(how: str, code: int) -> None:
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", RANK, how], capture_output=True, text=True, timeout=20)
    assert done.returncode == code, done.stderr
    assert time.monotonic() - began < 8
    assert ("does not run for 1 s" in done.stderr) == (code != 0)
    assert ("in stuck" in done.stderr) == (how == "stuck"), "the stacks of a rank that can still show them"


def test_it_goes_with_its_rank_and_takes_no_signal_for_itself() -> None:
    rank = subprocess.Popen([sys.executable, "-c", RANK, "beats"], stdout=subprocess.PIPE, text=True)
    with rank:
        keeper = int(rank.stdout.readline())
        time.sleep(0.3)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            subprocess.run(["kill", f"-{number.value}", str(keeper)], check=True)
        time.sleep(0.2)
        assert subprocess.run(["kill", "-0", str(keeper)]).returncode == 0
        rank.kill()
    deadline = time.monotonic() + 5
    while subprocess.run(["kill", "-0", str(keeper)], capture_output=True).returncode == 0:
        assert time.monotonic() < deadline
        time.sleep(0.05)
