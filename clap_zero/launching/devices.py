"""NVIDIA GPUs of this machine, asked from their driver: in milliseconds, and without torch."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

_UUID_BYTES = 96


def gpu_uuids() -> list[str] | None:
    """The UUID of each GPU that this machine (or container) has, in the driver's order.

    Returns:
        None where there is no driver of NVIDIA's: no GPU, or one of another make.
    """
    with _nvml() as library:
        if library is None:
            return None
        count = ctypes.c_uint()
        if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return None
        return [_uuid(library, index) for index in range(count.value)]


def _uuid(library: ctypes.CDLL, index: int) -> str:
    device, text = ctypes.c_void_p(), ctypes.create_string_buffer(_UUID_BYTES)
    if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) != 0:
        return ""
    if library.nvmlDeviceGetUUID(device, text, _UUID_BYTES) != 0:
        return ""
    return text.value.decode(errors="replace")


@contextlib.contextmanager
def _nvml() -> Iterator[ctypes.CDLL | None]:
    """The driver's library, ready to be asked."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        yield None
        return
    if library.nvmlInit_v2() != 0:
        yield None
        return
    try:
        yield library
    finally:
        library.nvmlShutdown()
