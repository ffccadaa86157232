"""What there is on this machine, as facts that can be sent to another one and compared there.

Light: no torch. The doctor asks every node for them over ssh, and each rank gives its own at the start of a run.
"""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from clap_zero.preflight.build_locks import clear_stale_locks, torch_asks_the_kernel
from clap_zero.preflight.code import code_hash, commit
from clap_zero.preflight.findings import Finding
from clap_zero.preflight.gpus import Gpu
from clap_zero.preflight.space import check_temporary_directory, may_be_shared
from clap_zero.preflight.versions import installed_versions, python_version

ENOUGH_FILES = 4096
"""Open files that a rank with loader processes and many shards may need."""
MANY_FILES = 65536


@dataclass(frozen=True)
class Facts:
    """What is compared between machines.

    Attributes:
        host: Its name for itself.
        python: Version, such as 3.11.9.
        executable: The interpreter.
        versions: Version by package.
        code: Hash over this package's files.
        commit: What is checked out; empty outside a checkout.
        clock: Seconds since the epoch, by this machine's clock.
        cores: That this process may use.
        memory_bytes: Of the whole machine, or of the container.
        gpus: Those that a run would use.
        addresses: Its network addresses, the first as DeepSpeed would take it for MASTER_ADDR.
    """

    host: str
    python: str
    executable: str
    versions: dict[str, str]
    code: str
    commit: str
    clock: float
    cores: int
    memory_bytes: int
    gpus: list[dict[str, Any]] = field(default_factory=list)
    addresses: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Facts:
        """From `as_dict` of this or of another version of the package. Raises TypeError where something is missing."""
        known = {one.name for one in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})


def facts_here(gpus: list[Gpu] | None = None) -> Facts:
    """The facts of this machine. Takes some 50 ms."""
    return Facts(
        host=socket.gethostname(),
        python=python_version(),
        executable=sys.executable,
        versions=installed_versions(),
        code=code_hash(),
        commit=commit(),
        clock=time.time(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=_memory_bytes(),
        gpus=[asdict(gpu) for gpu in gpus or []],
        addresses=_addresses(),
    )


def visible_devices() -> str | None:
    """CUDA_VISIBLE_DEVICES; None where it is not set."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def python_path() -> str:
    """PYTHONPATH; empty where it is not set."""
    return os.environ.get("PYTHONPATH", "")


def ssh_command() -> str:
    """How the user reaches other machines: CLAP_ZERO_SSH, such as `ssh -F file`."""
    return os.environ.get("CLAP_ZERO_SSH", "ssh")


def launcher_environment(ssh: Sequence[str]) -> dict[str, str]:
    """This process's variables, and the options of ssh for pdsh, which calls it by itself."""
    environment = dict(os.environ)
    if len(ssh) > 1:
        before = environment.get("PDSH_SSH_ARGS_APPEND", "")
        environment["PDSH_SSH_ARGS_APPEND"] = f"{before} {' '.join(ssh[1:])}".strip()
    return environment


def extensions_directory() -> Path:
    """Where torch puts the kernels that DeepSpeed has it compile."""
    named = os.environ.get("TORCH_EXTENSIONS_DIR")
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(named or f"{cache}/torch_extensions").expanduser()


def check_limits() -> Iterator[Finding]:
    """Raises this process's limit of open files as far as it may; loader processes inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MANY_FILES if hard == resource.RLIM_INFINITY else min(hard, MANY_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    if soft != resource.RLIM_INFINITY and soft < ENOUGH_FILES:
        yield Finding(
            "warning",
            f"a process may open {soft} files, {ENOUGH_FILES} are expected: raise the hard limit (ulimit -Hn, "
            "limits.conf, the container's --ulimit nofile)",
        )


def check_temporary() -> Iterator[Finding]:
    """The directory for the passing files of compilers, loaders and libraries: TMPDIR, or what Python takes."""
    named = os.environ.get("TMPDIR")
    # Python passes over a TMPDIR that is full, without a word; others do not.
    if named and Path(named).is_dir():
        yield from check_temporary_directory(Path(named))
        return
    try:
        yield from check_temporary_directory(Path(tempfile.gettempdir()))
    except FileNotFoundError as error:
        yield Finding("error", f"no directory for temporary files can be written: {error.strerror or error}")


def check_build_locks() -> Iterator[Finding]:
    """Removes the locks that killed compilations left here."""
    root = extensions_directory()
    yield from clear_stale_locks(root, kernel_locks=torch_asks_the_kernel(), shared=may_be_shared(root))


def _memory_bytes() -> int:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else ""
    return min(total, int(text)) if text.isdecimal() else total


def _addresses() -> list[str]:
    """As `hostname -I` gives them: that is what DeepSpeed's launcher asks."""
    try:
        done = subprocess.run(
            ["hostname", "-I"], capture_output=True, text=True, timeout=5, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.split()
