"""A Slurm cluster of two nodes on this machine: munged, slurmctld and two slurmds in one folder, as root."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")
CONFIG = """
ClusterName=bed
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_interval=1
ReturnToService=2
KillWait=5
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{second}] CPUs=4 RealMemory=4000
PartitionName=all Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Why no cluster can be made here; empty where one can."""
    absent = [program for program in PROGRAMS if shutil.which(program) is None]
    if absent:
        return f"{', '.join(absent)} not installed (apt-get install slurm-wlm munge)"
    return "" if os.geteuid() == 0 else "needs root"


def free_ports(count: int) -> int:
    """The first of several free ports in a row."""
    for first in range(21000, 29000, 10):
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("", port))
        except OSError:
            continue
        return first
    raise AssertionError("no free ports")


@contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Start it, and end what it started.

    Returns:
        Variables for sbatch, srun and their relatives.
    """
    port = free_ports(3)
    names = {"host": socket.gethostname(), "folder": folder, "port": port, "first": port + 1, "second": port + 2}
    (folder / "slurm.conf").write_text(CONFIG.format(**names))
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    variables = {"SLURM_CONF": str(folder / "slurm.conf")}
    parts = {"key-file": "key", "socket": "sock", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    munge = [f"--{name}={folder}/munge.{end}" for name, end in parts.items()]
    daemons = (["munged", "--force", *munge], ["slurmctld", "-c"], ["slurmd", "-N", "n1"], ["slurmd", "-N", "n2"])
    try:
        for words in daemons:
            subprocess.run(words, check=True, env=os.environ | variables)
        wait_for(lambda: "2 idle" in told(variables, "sinfo", "-h", "-o", "%D %t"), timeout_s=30)
        yield variables
    finally:
        for pid_file in sorted(folder.glob("*.pid"), key=lambda path: path.name == "munge.pid"):
            subprocess.run(["kill", pid_file.read_text().strip()], check=False)


def told(variables: dict[str, str], *words: str) -> str:
    """What a program of Slurm prints."""
    return subprocess.run(words, capture_output=True, text=True, check=False, env=os.environ | variables).stdout


def wait_for(condition, *, timeout_s: float) -> None:
    """Come back when a condition is true.

    Raises:
        AssertionError: It did not become true in time.
    """
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"not within {timeout_s} s"
        time.sleep(0.5)
