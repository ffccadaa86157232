"""Memory that a loader worker shares with its rank, used again and again.

Memory that is new costs a page fault for every 4 kB: for a batch of waveforms that takes ten times as long as the copy.
So a worker keeps its segments. The first byte of a segment says whether somebody may still read it: the worker sets it
before it writes, the rank clears it when the last tensor on it is gone, and the worker takes it again.
A batch that is kept costs a new segment, never a wait. Segments are nameless files in memory: none is left behind,
however the processes end, and /dev/shm, which is small in containers, is not needed.
"""

from __future__ import annotations

import math
import mmap
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.reduction import DupFd
from typing import Any

import numpy as np
import torch
from torch import Tensor

_HEADER_BYTES = 4096
_FREE, _TAKEN = 0, 1
SMALL_BYTES = 1 << 18
"""Tensors up to this size are copied through the pipe between a worker and its rank: that costs less than the two
processes shaking hands over a descriptor."""
_GROWTH = 1.25
"""Batches differ in size: a new segment has room for somewhat larger ones."""


class _Segment:
    """A piece of shared memory of this process.

    Attributes:
        num_bytes: room for data.
        data: where they begin, a view behind the header.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.fd = os.memfd_create("clap_zero_batch", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, _HEADER_BYTES + num_bytes)
        self._mapping = mmap.mmap(self.fd, _HEADER_BYTES + num_bytes)
        self.data = np.frombuffer(self._mapping, dtype=np.uint8, offset=_HEADER_BYTES)
        self._sent = False
        self._use = 0

    def is_free(self) -> bool:
        return self._mapping[0] == _FREE

    def take(self) -> int:
        """Begins a use of the segment; the number of it."""
        self._mapping[0], self._sent = _TAKEN, False
        self._use += 1
        return self._use

    def send(self) -> Any:
        """The descriptor, for another process, which frees the segment from now on."""
        self._sent = True
        return DupFd(self.fd)

    def drop(self, use: int) -> None:
        """The array of a use is gone in this process: without having been sent, nobody else would free it.

        An array may live on here after the other process has freed the segment and a later use has begun.
        """
        if use == self._use and not self._sent:
            self._mapping[0] = _FREE


@dataclass(frozen=True)
class SharedTensor:
    """A tensor on its way to another process; `open` gives it there.

    Attributes:
        fd: its segment, as multiprocessing passes descriptors on.
        num_bytes: size of the segment, its header included.
        shape: of the tensor.
        dtype: of the tensor, NumPy's name.
    """

    fd: Any
    num_bytes: int
    shape: tuple[int, ...]
    dtype: str

    def open(self) -> Tensor:
        """The tensor; once, in the process that got it. When it is gone with all its views, the memory is free."""
        fd = self.fd.detach()
        try:
            mapping = mmap.mmap(fd, self.num_bytes)
        finally:
            os.close(fd)
        array = np.frombuffer(mapping, dtype=self.dtype, count=math.prod(self.shape), offset=_HEADER_BYTES)
        weakref.finalize(array, _release, mapping).atexit = False
        return torch.from_numpy(array.reshape(self.shape))


def _release(mapping: mmap.mmap) -> None:
    mapping[0] = _FREE


_segments: dict[int, _Segment] = {}
"""Those of this process by the address of their data."""


def empty(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """An array with undefined content for a batch that is sent to another process; a large one in shared memory."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes <= SMALL_BYTES:
        return np.empty(shape, dtype)
    free = [segment for segment in _segments.values() if segment.is_free()]
    fitting = [segment for segment in free if segment.num_bytes >= num_bytes]
    if fitting:
        segment = min(fitting, key=lambda segment: segment.num_bytes)
    else:
        for small in free:  # the batches have grown
            del _segments[small.data.ctypes.data]
            os.close(small.fd)
        segment = _Segment(int(num_bytes * _GROWTH))
        _segments[segment.data.ctypes.data] = segment
    use = segment.take()
    array = segment.data[:num_bytes].view(dtype).reshape(shape)
    weakref.finalize(array, segment.drop, use).atexit = False
    return array


def outgoing(value: Any) -> Any:
    """What to pickle for a value: for a small tensor its content, for a large one the way to its shared memory."""
    if not isinstance(value, Tensor) or value.device.type != "cpu":
        return value
    if value.nbytes <= SMALL_BYTES:
        return value.numpy()
    array = value.numpy()
    segment = _segments.get(value.data_ptr()) if value.is_contiguous() else None
    if segment is None:
        # torch would share it through /dev/shm, which is small in containers.
        copy = empty(array.shape, array.dtype)
        copy[...] = array
        segment = _segments[copy.ctypes.data]
    dtype = str(array.dtype)
    return SharedTensor(segment.send(), _HEADER_BYTES + segment.num_bytes, tuple(value.shape), dtype)


def incoming(value: Any) -> Any:
    """The value that `outgoing` was given in the other process."""
    if isinstance(value, SharedTensor):
        return value.open()
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value
