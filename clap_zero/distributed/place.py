"""Who this process is among the ranks, from the variables of whatever launched it. Light: no torch.

With `world`, which hands these names on, the only reader of RANK, WORLD_SIZE and their relatives.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path

from clap_zero.errors import LaunchError

DEFAULT_PORT = 29500

_SLURM_COUNTS = "SLURM_STEP_TASKS_PER_NODE"
_FAMILIES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", _SLURM_COUNTS),
)
"""Rank, world size, local rank, local size in the variables of Open MPI, of MPICH and Intel MPI, and of srun.

mpirun inside a Slurm job sets both its own and Slurm's: its own come first.
"""


@dataclass(frozen=True)
class LaunchEnvironment:
    """What a launcher told this process, before anything heavy is imported or connected."""

    rank: int
    size: int
    local_rank: int
    local_size: int


def read_launch_environment() -> LaunchEnvironment:
    """Read the place of this process from the variables of DeepSpeed, torchrun, accelerate, srun or mpirun.

    Without any of them the process is a job of its own.

    Raises:
        LaunchError: Some of the variables are set and others are not, or one is not a number.
    """
    family = None if "RANK" in os.environ else _launcher_family()
    if family is not None:
        rank, total, local_rank, local_total = family
        size = _variable(total, 1)
        local_size = _slurm_local_size() if local_total == _SLURM_COUNTS else _variable(local_total, size)
        env = LaunchEnvironment(_variable(rank, 0), size, _variable(local_rank, 0), local_size)
    else:
        size = _variable("WORLD_SIZE", 1)
        local_size = _variable("LOCAL_WORLD_SIZE", _variable("LOCAL_SIZE", size))
        env = LaunchEnvironment(_variable("RANK", 0), size, _variable("LOCAL_RANK", 0), local_size)
    if env.size > 1 and "MASTER_ADDR" not in os.environ:
        raise LaunchError(
            f"this is process {env.rank} of {env.size}, but MASTER_ADDR is not set, so the processes cannot meet: "
            "start with `deepspeed`, `torchrun` or launch/slurm.sbatch, or export MASTER_ADDR and MASTER_PORT"
        )
    if not 0 <= env.rank < env.size:
        raise LaunchError(f"RANK={env.rank} does not fit WORLD_SIZE={env.size}: ranks go from 0 to {env.size - 1}")
    return env


def speaks_for_host() -> bool:
    """Whether this process says what all ranks of its host know, also before the ranks have met."""
    family = _launcher_family()
    return (os.environ.get("LOCAL_RANK") or (family and os.environ.get(family[2])) or "0") == "0"


def meeting_address() -> str:
    """Name or address of rank 0's machine, as this process reaches it."""
    return os.environ.get("MASTER_ADDR", "127.0.0.1")


def meeting_port() -> int:
    """Where rank 0 waits for the others there.

    Raises:
        LaunchError: It is not a number.
    """
    return _variable("MASTER_PORT", DEFAULT_PORT)


def attempt() -> str:
    """What the ranks of a job have in common, and those of another job on that machine do not.

    No count of restarts: each agent of torchrun has its own.
    """
    size = read_launch_environment().size
    return f"{meeting_port()} {size} {os.environ.get('TORCHELASTIC_RUN_ID', '')}"


def was_launched() -> bool:
    """Whether a launcher started this process, and not a shell. Ask before `init_distributed`, which completes RANK."""
    return "RANK" in os.environ or "SLURM_STEP_ID" in os.environ or _launcher_family() is not None


def describe_process() -> str:
    """What to call this process in a message: `rank 3 on host7`, or nothing in a job of one process."""
    family = _launcher_family()
    if (os.environ.get("WORLD_SIZE") or (family and os.environ.get(family[1])) or "1") == "1":
        return ""
    return f"rank {rank_as_text()} on {socket.gethostname()}"


def rank_as_text() -> str:
    """The number of this process, whether or not it is known to be one."""
    family = _launcher_family()
    return os.environ.get("RANK") or (family and os.environ.get(family[0])) or "0"


def report_exit_code(code: int | None) -> None:
    """Leave this rank's exit code where the scripts in launch/ look for it, since launchers lose codes.

    Args:
        code: The code that the process is about to end with; None while it runs.
    """
    folder = os.environ.get("CLAP_ZERO_EXIT_CODES")
    if not folder:
        return
    # A folder that is gone belongs to a script that is gone: nobody asks any more.
    with contextlib.suppress(OSError):
        Path(folder, f"rank{rank_as_text()}").write_text("running\n" if code is None else f"{code}\n")


def _launcher_family() -> tuple[str, str, str, str] | None:
    """The names under which a launcher other than DeepSpeed and torchrun tells more than one process its place."""
    for family in _FAMILIES:
        # All four, and not the first alone: the shell of a Slurm job is task 0, too, and srun can speak MPICH's.
        if family[0] in os.environ and family[3] in os.environ and os.environ.get(family[1], "1") != "1":
            return family
    return None


def _variable(name: str, default: int) -> int:
    value = os.environ.get(name)
    if value is None or value == "":
        return default
    try:
        return int(value)
    except ValueError:
        raise LaunchError(f"the environment variable {name} is {value!r}, not a whole number") from None


def _slurm_local_size() -> int:
    """Ranks on this host: srun says "8(x2),4" for two hosts of 8 and one of 4."""
    counts: list[int] = []
    for part in (os.environ.get("SLURM_STEP_TASKS_PER_NODE") or "1").split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise LaunchError(
                f"SLURM_STEP_TASKS_PER_NODE is {os.environ['SLURM_STEP_TASKS_PER_NODE']!r}: not understood"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts[min(_variable("SLURM_NODEID", 0), len(counts) - 1)]
