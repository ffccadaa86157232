"""Starting worker processes that import neither the caller's main module nor anything heavy."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import multiprocessing.util
import os
import shutil
import signal
import sys
import threading
import types
from collections.abc import Iterator
from multiprocessing import resource_tracker
from multiprocessing.context import ForkServerContext

from clap_zero.errors import DataError

_HELD_BACK = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP}


def forkserver_context(*preload: str) -> ForkServerContext:
    """The start method of all workers. Fork can deadlock with torchaudio, spawn pays for all imports each time.

    Args:
        preload: modules that the server imports once for all workers (where the package is installed).
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    return context


@contextlib.contextmanager
def starting_workers() -> Iterator[None]:
    """Hides `__main__` and holds back the signals that stop a run while the fork server and its workers start.

    They would import the main module again, with all that it imports. And launchers send SIGTERM to the whole tree of
    processes to end a job: the parent finishes its step first and still needs its workers, which inherit the blocked
    signal and go when the parent goes. Ctrl-C goes to all of them, too: the fork server would print a traceback.

    Raises:
        DataError: the fork server or a worker died meanwhile.
    """
    multiprocessing.util.get_temp_dir()  # now: workers then use it, too, instead of making one each
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    resource_tracker.ensure_running()  # now: starting it later would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_BACK)
    try:
        yield
    except (EOFError, ConnectionError) as error:  # what multiprocessing meets at the end of a broken pipe
        raise DataError(
            "the processes that read data did not start, their server died: was it killed, or is memory full?"
        ) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        sys.modules["__main__"] = main


def remove_leftovers() -> None:
    """Gives back what multiprocessing holds, for a process that ends without Python's own clean-up.

    That is the directory of the fork server's sockets, and semaphores, which the traceback of an error keeps: they
    would be called leaked at the end.
    """
    multiprocessing.util._run_finalizers(0)  # type: ignore[attr-defined]
    _remove_directory()


def _remove_directory() -> None:
    path = getattr(multiprocessing.current_process(), "_config", {}).get("tempdir")
    if path is not None:
        shutil.rmtree(path, ignore_errors=True)


def init_worker(parent_pid: int, worker: int = 0) -> None:
    """Runs first in each worker: one thread, Ctrl-C is left to the parent, and it goes when its parent goes.

    Args:
        parent_pid: the process that the worker works for; its real parent is the fork server.
        worker: number of the worker, as torch passes it.
    """
    import torch  # takes seconds, and a parent of workers needs none of it

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_leave_with, args=(parent_pid,), name=f"watch-{parent_pid}", daemon=True).start()


def _leave_with(parent_pid: int) -> None:
    """Ends this process as soon as the parent is gone: a killed parent cannot tell its workers."""
    try:
        handle = os.pidfd_open(parent_pid)
    except ProcessLookupError:
        os._exit(1)
    except (AttributeError, OSError):
        return  # not Linux: the slower watch of torch has to do
    # A pidfd becomes readable when its process ends.
    multiprocessing.connection.wait([handle])
    _remove_directory()  # the parent's: it was killed, or did not look
    os._exit(1)
