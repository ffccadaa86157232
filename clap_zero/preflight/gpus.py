"""The GPUs of this machine as nvidia-smi sees them, without touching them."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from clap_zero.preflight.findings import Finding
from clap_zero.preflight.space import told_bytes

NONE_VISIBLE = ("", "-1", "NoDevFiles")
"""Values of CUDA_VISIBLE_DEVICES that hide all GPUs."""
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
        total_bytes: Its memory; 0: not known.
        used_bytes: What of it is in use, by whomever.
        driver: Version of the driver.
        uuid: Such as GPU-1a2b...; of a slice of a GPU MIG-1a2b...
    """

    index: int
    name: str
    total_bytes: int
    used_bytes: int
    driver: str
    uuid: str = ""


def find_gpus(visible: str | None) -> tuple[list[Gpu], list[Finding]]:
    """The GPUs that a run here would use.

    Args:
        visible: CUDA_VISIBLE_DEVICES; None where it is not set.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return [], []
    outputs = []
    for words in ((_QUERY, "--format=csv,noheader,nounits"), ("-L",))[: 2 if "MIG-" in (visible or "") else 1]:
        try:
            done = subprocess.run(
                [program, *words],
                capture_output=True, text=True, timeout=_WAIT_S, check=False, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            text = f"nvidia-smi does not answer within {_WAIT_S:.0f} s: the driver or a GPU hangs"
            return [], [Finding("error", text)]
        if done.returncode != 0:
            reason = (done.stdout + done.stderr).strip().splitlines() or ["no reason given"]
            return [], [Finding("error", f"nvidia-smi fails: {reason[0]}")]
        outputs.append(done.stdout)
    gpus = read_table(outputs[0])
    return choose(gpus, read_slices(outputs[1], gpus) if len(outputs) > 1 else [], visible)


def read_table(text: str) -> list[Gpu]:
    """The GPUs in nvidia-smi's table."""
    gpus = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 6 and fields[0].isdecimal():
            index, uuid, name, total, used, driver = fields
            gpus.append(Gpu(int(index), name, _mib(total), _mib(used), driver, uuid))
    return gpus


def read_slices(text: str, gpus: Sequence[Gpu]) -> list[Gpu]:
    """The MIG slices in the list that `nvidia-smi -L` prints, each below its GPU."""
    slices: list[Gpu] = []
    whole: Gpu | None = None
    for line in text.splitlines():
        if found := re.match(r"GPU (\d+):", line):
            whole = next((gpu for gpu in gpus if gpu.index == int(found[1])), None)
        elif whole is not None and (found := re.match(r"\s+(MIG \S+)\s.*\(UUID: (MIG-[^)]+)\)", line)):
            slices.append(Gpu(whole.index, f"{found[1]} of {whole.name}", 0, 0, whole.driver, found[2]))
    return slices


def choose(gpus: Sequence[Gpu], slices: Sequence[Gpu], visible: str | None) -> tuple[list[Gpu], list[Finding]]:
    """What CUDA_VISIBLE_DEVICES lets through, and its entries that name nothing here.

    CUDA leaves out what comes after such an entry; of MIG slices a process sees the first one only.
    """
    if visible is None or not gpus:
        return list(gpus), []
    chosen: list[Gpu] = []
    for entry in [] if visible in NONE_VISIBLE else [part.strip() for part in visible.split(",") if part.strip()]:
        among = slices if entry.startswith("MIG-") else gpus
        found = [gpu for gpu in among if str(gpu.index) == entry or gpu.uuid.startswith(entry)]
        if len(found) != 1:
            text = f"CUDA_VISIBLE_DEVICES={visible}: this machine has no GPU {entry!r}; it has 0 to {len(gpus) - 1}"
            return chosen, [Finding("error", text)]
        chosen += found
        if among is slices:
            left = "" if entry == visible else f"CUDA_VISIBLE_DEVICES={visible}: a process uses no more than {entry}"
            return found, [Finding("warning", left)] if left else []
    return chosen, []


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
