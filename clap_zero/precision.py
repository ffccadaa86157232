"""Products in full float32, whatever precision the program around has chosen; sums in float64, where there is one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

_SWITCHES = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]


class _Ieee:
    """While any thread is inside, the program's precision switches are at "ieee"; the last one out puts them back."""

    def __init__(self) -> None:
        self._lock, self._inside, self._before = threading.Lock(), 0, [""] * len(_SWITCHES)

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._before = [switch.fp32_precision for switch in _SWITCHES]
                for switch in _SWITCHES:
                    switch.fp32_precision = "ieee"
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                for switch, value in zip(_SWITCHES, self._before, strict=True):
                    switch.fp32_precision = value


_IEEE = _Ieee()


@contextlib.contextmanager
def exact_float32(device: torch.device) -> Iterator[None]:
    """No TF32 or bf16 inside matrix products, no autocast and no graph. Threads may be inside at the same time."""
    with _IEEE, torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


def wide(device: torch.device) -> torch.dtype:
    """fp64, for sums that cancel; fp32 on mps, which has no fp64."""
    return torch.float32 if device.type == "mps" else torch.float64
