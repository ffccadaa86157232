from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clap_zero.hooks.watchdog import SAME_INTERRUPT_S

# A main thread that sits in C and never returns to Python, as one that waits in a collective does.
STUCK = """
import os, sys, threading, time
parent = int(os.environ.get("PARENT") or os.getppid())
from clap_zero.hooks.watchdog import Watchdog
watchdog = Watchdog(parent=parent).start().take_signals()
print("ready", flush=True)
def report():
    while not watchdog.stop_requested():
        time.sleep(0.05)
    print("asked", watchdog.stop_requested(), flush=True)
threading.Thread(target=report, daemon=True).start()
import ctypes
while True:
    ctypes.CDLL(None).sleep(60)
"""

PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, text=True)
print(child.stdout.readline().strip(), child.pid, flush=True)
child.wait()
"""


def start(*command: str, **variables: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", *command],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(process: subprocess.Popen) -> None:
    """Kill a process whose child lives on and keeps its pipes open."""
    process.kill()
    process.wait()
    for pipe in (process.stdout, process.stderr):
        pipe.close()


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_until_gone(pid: int, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if not is_alive(pid):
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_is_noticed_while_the_main_thread_is_stuck(number: signal.Signals) -> None:
    process = start(STUCK)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(number)
    assert process.stdout.readline() == f"asked {number.name}\n"
    assert process.poll() is None
    process.kill()
    process.communicate()


@pytest.mark.parametrize("turned_away", [False, True])
def test_a_second_interrupt_ends_the_process_at_once(turned_away: bool) -> None:
    """And says so, also while a library compiles something and has turned standard error away for that."""
    turn = "os.dup2(os.open(os.devnull, os.O_WRONLY), 2)\n" if turned_away else ""
    process = start(STUCK.replace('print("ready"', f'{turn}print("ready"'))
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "asked SIGINT\n"
    time.sleep(SAME_INTERRUPT_S + 0.2)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=10)
    assert process.returncode == 5
    assert "second SIGINT" in stderr


def test_one_interrupt_that_a_launcher_hands_on_is_no_second_one() -> None:
    """Ctrl-C on `deepspeed`: SIGINT from the terminal and SIGTERM from launch.py come together, in any order."""
    process = start(STUCK)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGSTOP)
    for number in (signal.SIGTERM, signal.SIGINT):
        process.send_signal(number)
    process.send_signal(signal.SIGCONT)
    assert process.stdout.readline().startswith("asked ")
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(2)
    process.kill()
    process.communicate()


def test_a_rank_ends_when_its_launcher_was_killed() -> None:
    parent = start(PARENT, STUCK, RANK="0")
    assert parent.stdout is not None
    word, pid = parent.stdout.readline().split()
    assert word == "ready" and is_alive(int(pid))
    parent.kill()
    parent.communicate()
    assert wait_until_gone(int(pid), 5), "the orphan lives on"


def test_a_run_that_a_shell_started_outlives_it() -> None:
    parent = start(PARENT, STUCK)
    assert parent.stdout is not None
    word, pid = parent.stdout.readline().split()
    assert word == "ready"
    end(parent)
    assert not wait_until_gone(int(pid), 2), "no launcher was there, so none can be missed"
    os.kill(int(pid), signal.SIGKILL)


def test_a_parent_that_died_during_the_start_is_missed() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    process = start(STUCK, RANK="0", PARENT=str(gone.pid))
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 5 and f"process {gone.pid}) is gone" in stderr


def test_a_rank_that_was_asked_to_stop_may_finish_without_its_launcher() -> None:
    """Ctrl-C ends the `deepspeed` command at once; the ranks still write their checkpoint."""
    parent = start(PARENT, STUCK, RANK="0")
    assert parent.stdout is not None
    pid = int(parent.stdout.readline().split()[1])
    os.kill(pid, signal.SIGINT)
    end(parent)
    assert not wait_until_gone(pid, 2)
    os.kill(pid, signal.SIGKILL)
