"""Versions of what a run stands on, read from what is installed without importing it, and pairs known to be bad."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
from collections.abc import Iterator
from pathlib import Path

from clap_zero.preflight.findings import Finding, Level

PACKAGES = ("clap-zero", "torch", "deepspeed", "transformers")
"""Have to be equal on all nodes: the ranks run one program together."""

OTHERS = ("torchaudio", "numpy", "webdataset", "wandb", "tokenizers")
"""Should be equal: a difference is a warning."""

ABSENT = "not installed"


def installed_versions() -> dict[str, str]:
    """Version by package; with `cuda` and `nccl` as torch brings them, where it does."""
    versions = {}
    for name in (*PACKAGES, *OTHERS):
        try:
            versions[name] = importlib.metadata.version(name) if _has_code(name) else ABSENT
        except importlib.metadata.PackageNotFoundError:
            versions[name] = ABSENT
    versions["cuda"] = _cuda_of_torch()
    for name in ("nvidia-nccl-cu13", "nvidia-nccl-cu12"):
        try:
            versions["nccl"] = importlib.metadata.version(name)
            break
        except importlib.metadata.PackageNotFoundError:
            continue
    return {name: version for name, version in versions.items() if version}


def python_version() -> str:
    """Such as 3.11.9."""
    return platform.python_version()


def numbers(version: str) -> tuple[int, ...]:
    """The first three numbers of a version, to be compared: "2.14.1+cu130" -> (2, 14, 1)."""
    found = [int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3]]
    return (*found, 0, 0, 0)[:3]


def known_bad(versions: dict[str, str]) -> Iterator[Finding]:
    """Versions that are known not to work, by themselves or together.

    Each was seen in public reports or by running it; the text says what happens.
    """

    def has(name: str) -> bool:
        return versions.get(name, ABSENT) != ABSENT

    def between(name: str, low: str, high: str) -> bool:
        """Whether low <= version < high."""
        return has(name) and numbers(low) <= numbers(versions[name]) < numbers(high)

    rules: list[tuple[bool, Level, str]] = [
        (between("deepspeed", "0.17.6", "0.18.3"), "error", "deepspeed {deepspeed} computes wrong ZeRO-2 gradients"),
        (
            between("deepspeed", "0", "0.19.0") and not between("deepspeed", "0.17.6", "0.18.3"),
            "warning",
            "deepspeed {deepspeed} loses gradients of several backwards with CPU offload",
        ),
        (
            between("deepspeed", "0", "0.19.3"),
            "warning",
            "deepspeed {deepspeed} is wrong at ZeRO-3 with activation checkpointing and frozen parameters",
        ),
        (
            between("deepspeed", "0", "0.19.5") and between("torch", "2.12", "999"),
            "error",
            "deepspeed {deepspeed} does not compile its kernels with torch {torch}",
        ),
        (
            between("torch", "2.6.1", "2.7.1"),
            "warning",
            "torch {torch} can hang at the start of a process group that is given its device",
        ),
        (
            between("wandb", "0.20", "999") and between("deepspeed", "0", "0.17.2"),
            "warning",
            "wandb {wandb} does not work with deepspeed {deepspeed}",
        ),
        (
            between("transformers", "0", "5.6"),
            "warning",
            "transformers {transformers} gives BatchNorm buffers to rank 0 only when it loads a model at ZeRO-3",
        ),
        (
            between("torchaudio", "2.11", "999") and between("torch", "0", "2.11"),
            "error",
            "torchaudio {torchaudio} needs torch 2.11 or newer, there is {torch}",
        ),
        (
            platform.machine() == "x86_64" and "+cpu" in versions.get("torch", "") and has("torchaudio")
            and "+cpu" not in versions["torchaudio"] and between("torchaudio", "2.11", "999"),
            "error",
            "torchaudio {torchaudio} cannot be imported beside torch {torch}: install both from one index",
        ),
    ]  # fmt: skip
    for applies, level, text in rules:
        if applies:
            yield Finding(level, text.format_map(versions) + "; `pip install -U` what stands in pyproject.toml")


def missing_packages(versions: dict[str, str]) -> Iterator[Finding]:
    """What is not there at all. Of other machines `compare` tells it, with the version that is expected."""
    for name in PACKAGES:
        if versions.get(name, ABSENT) == ABSENT:
            yield Finding("error", f"{name} is not installed in this environment: pip install -e . puts all in")


def _has_code(name: str) -> bool:
    """Whether there is a module to import; an installation that broke off may have left its metadata only."""
    spec = importlib.util.find_spec(name.replace("-", "_"))
    return spec is not None and spec.origin is not None


def _cuda_of_torch() -> str:
    """What torch/version.py says, read as text: importing torch takes seconds."""
    try:
        folder = importlib.metadata.distribution("torch").locate_file("torch")
        text = Path(str(folder), "version.py").read_text()
    except (importlib.metadata.PackageNotFoundError, OSError):
        return ""
    match = re.search(r"^cuda[^=]*=\s*'([\d.]+)'", text, re.MULTILINE)
    return match[1] if match else ""
