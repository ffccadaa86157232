"""A cable that delays and loses frames, for kernels without netem: joins two tap devices in two network namespaces.

Run as `python -I wire.py NETNS_PID DELAY_S LOSS` in the namespace of the switch, with NETNS_PID a process of the host.
The device is called `wire` on the switch's side and `eth0` on the host's.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import sys
import time
from pathlib import Path

TUNSETIFF = 0x400454CA
IFF_TAP, IFF_NO_PI = 0x0002, 0x1000
CLONE_NEWNET = 0x40000000
FRAME_BYTES = 65_536


def open_tap(name: str) -> int:
    """A tap device in the namespace of this thread. No offloads, so that each frame is whole and has its checksum."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    return device


def enter_network_of(pid: str) -> None:
    with Path(f"/proc/{pid}/ns/net").open() as namespace:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(namespace.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")


def carry(ends: tuple[int, int], *, delay_s: float, loss: float) -> None:
    """Carry frames both ways, in order, each `delay_s` late and with probability `loss` never, until stdin ends."""
    other = {ends[0]: ends[1], ends[1]: ends[0]}
    waiting: list[tuple[float, int, int, bytes]] = []
    count = 0
    while True:
        timeout_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        readable = select.select([*ends, sys.stdin], [], [], timeout_s)[0]
        if sys.stdin in readable:
            return
        for end in readable:
            assert isinstance(end, int)
            frame = os.read(end, FRAME_BYTES)
            if random.random() >= loss:
                count += 1
                heapq.heappush(waiting, (time.monotonic() + delay_s, count, other[end], frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, target, frame = heapq.heappop(waiting)
            try:
                os.write(target, frame)
            except OSError:
                continue  # the device is down or full: a cable loses it


def main() -> None:
    pid, delay_s, loss = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
    switch_end = open_tap("wire")
    enter_network_of(pid)
    ends = (switch_end, open_tap("eth0"))
    print("ready", flush=True)
    carry(ends, delay_s=delay_s, loss=loss)


if __name__ == "__main__":
    main()
