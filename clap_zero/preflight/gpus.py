"""The GPUs of this machine as nvidia-smi sees them, without touching them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from clap_zero.preflight.findings import Finding
from clap_zero.preflight.space import told_bytes

_QUERY = "--query-gpu=index,uuid,name,memory.total,memory.used,driver_version"
_WAIT_S = 20.0
_BUSY_SHARE = 0.1
"""More memory in use than this is another job; a driver alone takes about one percent."""


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Attributes:
        index: Its number on this machine.
        name: Such as NVIDIA H200.
        total_bytes: Its memory.
        used_bytes: What of it is in use, by whomever.
        driver: Version of the driver.
    """

    index: int
    name: str
    total_bytes: int
    used_bytes: int
    driver: str


def find_gpus(visible: str | None) -> tuple[list[Gpu], list[Finding]]:
    """The GPUs that a run here would use.

    Args:
        visible: CUDA_VISIBLE_DEVICES; None where it is not set.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return [], []
    try:
        done = subprocess.run(
            [program, _QUERY, "--format=csv,noheader,nounits"],
            capture_output=True, text=True, timeout=_WAIT_S, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return [], [Finding("error", f"nvidia-smi does not answer within {_WAIT_S:.0f} s: the driver or a GPU hangs")]
    if done.returncode != 0:
        reason = (done.stdout + done.stderr).strip().splitlines() or ["no reason given"]
        return [], [Finding("error", f"nvidia-smi fails: {reason[0]}")]
    return read_table(done.stdout, visible), []


def read_table(text: str, visible: str | None) -> list[Gpu]:
    """The GPUs in nvidia-smi's table that CUDA_VISIBLE_DEVICES lets through."""
    gpus = []
    wanted = None if visible is None else [part.strip() for part in visible.split(",") if part.strip()]
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 6 or not fields[0].isdecimal():
            continue
        index, uuid, name, total, used, driver = fields
        if wanted is None or index in wanted or any(uuid.startswith(part) for part in wanted):
            gpus.append(Gpu(int(index), name, _mib(total), _mib(used), driver))
    return gpus


def check_gpus(gpus: list[Gpu]) -> Iterator[Finding]:
    """Whether they are free."""
    for gpu in gpus:
        if gpu.total_bytes and gpu.used_bytes > _BUSY_SHARE * gpu.total_bytes:
            yield Finding(
                "warning",
                f"GPU {gpu.index} is busy: {told_bytes(gpu.used_bytes)} of {told_bytes(gpu.total_bytes)} are in use by "
                "other processes (nvidia-smi shows them)",
            )


def _mib(text: str) -> int:
    return int(text) << 20 if text.isdecimal() else 0
