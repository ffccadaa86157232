"""Process 1 of a host of the test bed: makes the host's own files, starts sshd, reaps, and ends with its parent's pipe.

Run as `python -I host_init.py JSON` in new network, PID, UTS, IPC and mount namespaces. When it ends, for whatever
reason, the kernel kills everything else on the host.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import FrameType


def reap(_number: int, _frame: FrameType | None) -> None:
    """Take the exit codes of orphans, which end up here."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return


def main() -> None:
    settings = json.loads(sys.argv[1])
    socket.sethostname(settings["name"])
    for source, target in settings["binds"].items():
        subprocess.run(["mount", "--bind", source, target], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "none", "/run"], check=True)
    Path("/run/sshd").mkdir()
    print("mounted", flush=True)
    sys.stdin.readline()  # the network is there
    subprocess.run(["/usr/sbin/sshd", "-f", "/etc/ssh/sshd_config"], check=True)
    signal.signal(signal.SIGCHLD, reap)
    print("ready", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
