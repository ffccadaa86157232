"""Out of memory: which errors mean it, what a rank says then, and whether the kernel has killed for it."""

from __future__ import annotations

import contextlib
import errno
import re
import resource
import sys
from pathlib import Path

_SIGNS = ("DefaultCPUAllocator: can't allocate", "DefaultCPUAllocator: not enough memory", "CUDA out of memory")
_ONEDNN = "could not create a primitive"
"""All that oneDNN says where it cannot have its buffers; what it does not support is a "primitive descriptor"."""

_ASKED = re.compile(r"(?:allocate|Unable to allocate) ([\d.]+ ?(?:bytes|[KMGTPE]i?B))")
_CAPACITY = re.compile(r"total capacity of ([\d.]+ ?[KMGTPE]iB)")

_STAGE = (
    "raise zero_optimization.stage (--ds.zero_optimization.stage 3), or offload "
    "(--ds.zero_optimization.offload_optimizer.device cpu)"
)
_BATCH = (
    "lower train_micro_batch_size_per_gpu (--ds.train_micro_batch_size_per_gpu N; the global batch stays if "
    "gradient_accumulation_steps rises), switch activation checkpointing on where it is off "
    f"(--ds.activation_checkpointing '{{}}'), {_STAGE}"
)
_WAYS_OUT = {
    "data": "lower --data.workers or the micro batch, or give the job more memory",
    "forward": _BATCH,
    "backward": _BATCH,
    "evaluation": "lower --evaluate.batch_size",
}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory could not be had, on the device or on the host."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:  # of mmap, and of a fork
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and (text.strip() == _ONEDNN or any(sign in text for sign in _SIGNS))


def describe(error: BaseException, *, phase: str) -> str:
    """What was asked for, what was held, and the way out, as one line.

    Args:
        error: One that `is_out_of_memory`.
        phase: Where it was raised.
    """
    text = str(error)
    asked, capacity = _ASKED.search(text), _CAPACITY.search(text)
    parts = ["out of memory" + (" on the host" if not _is_of_device(error) else " on the device")]
    if asked:
        parts.append(f"{_readable(asked[1])} more were asked for")
    held = f"at most {_gib(_peak_bytes(on_device=_is_of_device(error)))} were held before"
    parts.append(f"{held} of {capacity[1]}" if capacity else held)
    return f"{', '.join(parts)}: {_WAYS_OUT.get(phase, _STAGE)}"


def kernel_kills() -> int:
    """Processes that the kernel has killed for want of memory so far, in this container or on this machine.

    Two calls tell whether one was killed in between; 0 where the kernel does not say.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        own = Path("/proc/self/cgroup").read_text().rpartition("0::")[2].split("\n")[0]
        return _counted(Path("/sys/fs/cgroup" + own.rstrip("/"), "memory.events"))
    with contextlib.suppress(OSError, ValueError, IndexError):
        return _counted(Path("/proc/vmstat"))
    return 0


def _counted(path: Path) -> int:
    found = [line.split()[1] for line in path.read_text().splitlines() if line.startswith("oom_kill ")]
    return int(found[0])


def _is_of_device(error: BaseException) -> bool:
    return type(error).__name__ == "OutOfMemoryError" or "CUDA" in str(error)


def _peak_bytes(*, on_device: bool) -> int:
    torch = sys.modules.get("torch")  # where it is not imported, nothing is on the device
    if on_device and torch is not None and torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _readable(amount: str) -> str:
    number, _, unit = amount.partition(" ")
    return _gib(int(float(number))) if unit == "bytes" else amount


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
