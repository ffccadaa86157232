"""The watch over pdsh, with a program of that name whose children stand for the connections to two hosts."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

COMMAND = """
import subprocess, sys
from clap_zero.launching import watch_pdsh
watch_pdsh.POLL_S = 0.1
asked = []
def ask(host):
    asked.append(host)
    return sys.argv[1] or None
watch_pdsh.watch(["node1", "someone@node2"], ask=ask)
longest_s = 8 if sys.argv[1] else 2
hosts = f"sh -c 'sleep 0.5; true' ssh node2 & sh -c 'sleep {longest_s}; true' ssh node1 >/dev/null 2>&1 & wait"
pdsh = subprocess.Popen(["pdsh", "-c", hosts], executable="/bin/sh")
print("pdsh", pdsh.pid, flush=True)
pdsh.wait()
print("asked", *asked, flush=True)
"""


@pytest.mark.parametrize("trouble", ["node2: no such library", ""])
def test_a_host_that_ends_before_the_others_is_asked_why(trouble: str) -> None:
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", COMMAND, trouble], capture_output=True, text=True, check=False)
    if trouble:
        assert (done.returncode, done.stderr) == (5, f"clap_zero: error: {trouble}; this job ends\n")
        assert time.monotonic() - began < 6, "it does not wait for the other host"
    else:
        assert (done.returncode, done.stderr) == (0, ""), "a host that has done its part, and well"
        assert "asked someone@node2\n" in done.stdout
