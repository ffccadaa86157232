"""What a rank of a test pool runs: join the group, then do one call after the other until the pipe closes."""

from __future__ import annotations

import faulthandler
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection

from clap_zero.testing.messages import STACK_SIGNAL, Failure, Reply, Success, unpack_task


def main() -> None:
    """Serve the calls of the test process. Arguments: the pipe's file descriptor, the test process's id."""
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    os.set_inheritable(descriptor, False)
    faulthandler.register(STACK_SIGNAL, all_threads=True)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    pipe = Connection(descriptor)
    pipe.send_bytes(_answer(_join))
    while True:
        try:
            task = pipe.recv_bytes()
        except (EOFError, ConnectionResetError):
            os._exit(0)
        pipe.send_bytes(_answer(lambda task=task: _call(task)))


def _join() -> None:
    import torch

    from clap_zero.distributed.world import init_distributed

    torch.set_num_threads(1)
    init_distributed()


def _call(task: bytes) -> object:
    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    function, args = unpack_task(task)
    return function(*args)


def _answer(call) -> bytes:
    """The reply to one call, packed. Whatever a call raises is an answer, not the end of this process."""
    reply: Reply
    try:
        return pickle.dumps(Success(call()))
    except BaseException as error:  # noqa: BLE001  a test may raise anything, SystemExit too
        text = traceback.format_exc()
        reply = Failure(error if isinstance(error, Exception) and _survives_pickling(error) else None, text)
    return pickle.dumps(reply)


def _survives_pickling(error: Exception) -> bool:
    try:
        return type(pickle.loads(pickle.dumps(error))) is type(error)
    except Exception:  # noqa: BLE001  __reduce__ and __init__ of any class
        return False


def _end_with(parent: int) -> None:
    """End this process and its children when the test process is gone, even if a call never returns."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
