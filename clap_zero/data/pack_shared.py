"""Memory that a packing process shares with its workers: what they encode reaches the parent without a pipe.

A pipe takes 64 kB at a time, and costs the parent half a millisecond for a clip of 10 s, twice what writing it to the
tar costs. The memory has no name in any file system: nothing is left of it when the processes are gone, however they
end, and its size is not that of /dev/shm, which containers keep small.
"""

from __future__ import annotations

import functools
import mmap
import os
from dataclasses import dataclass

SLOT_BYTES = 1 << 20
_MAX_SLOTS = 512


@dataclass(frozen=True)
class Slot:
    """A place for one encoded clip: the file of the parent that holds it, and where it starts."""

    parent: int
    descriptor: int
    offset: int

    def put(self, data: bytes) -> bool:
        """Copies data into the slot, in a worker. False where it does not fit, or the memory cannot be reached."""
        memory = _opened(self.parent, self.descriptor) if len(data) <= SLOT_BYTES else None
        if memory is None:
            return False
        memory[self.offset : self.offset + len(data)] = data
        return True


class Slots:
    """The slots of a parent. Pages are taken as they are written."""

    def __init__(self, number: int) -> None:
        number = min(number, _MAX_SLOTS)
        self._free: list[Slot] = []
        self._descriptor: int | None = None
        try:
            self._descriptor = os.memfd_create("clap-zero-pack")
            os.ftruncate(self._descriptor, number * SLOT_BYTES)
            self._memory = memoryview(mmap.mmap(self._descriptor, number * SLOT_BYTES))
        except (AttributeError, OSError):  # not Linux, or not allowed: everything goes through the pipe
            return
        self._free = [Slot(os.getpid(), self._descriptor, place * SLOT_BYTES) for place in range(number)]

    def take(self) -> Slot | None:
        """A free slot, None if there is none."""
        return self._free.pop() if self._free else None

    def give_back(self, slot: Slot | None) -> None:
        """Frees a slot: what `view` gave is not to be looked at any more."""
        if slot is not None:
            self._free.append(slot)

    def view(self, slot: Slot, size_bytes: int) -> memoryview:
        """What a worker put into a slot; no copy."""
        return self._memory[slot.offset : slot.offset + size_bytes]

    def close(self) -> None:
        """Lets go of the descriptor; the memory goes with the last view of it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


@functools.lru_cache(maxsize=1)
def _opened(parent: int, descriptor: int) -> mmap.mmap | None:
    try:
        opened = os.open(f"/proc/{parent}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        try:
            return mmap.mmap(opened, 0)
        finally:
            os.close(opened)
    except (OSError, ValueError):
        return None
