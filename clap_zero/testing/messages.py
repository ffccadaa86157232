"""What the test process and its ranks say to each other, and how a function of a test module is found there."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pickle
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

STACK_SIGNAL = signal.SIGUSR2
"""Sent to a rank that hangs: it writes the stacks of all its threads to its log."""

PLACE_VARIABLES = frozenset(
    {
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "GLOO_SOCKET_IFNAME",
        "CUDA_VISIBLE_DEVICES",
        "DS_ACCELERATOR",
        "OMP_NUM_THREADS",
        "PYTHONUNBUFFERED",
        "PYTHONPATH",
    }
)
"""Variables that belong to the rank and do not follow the test process."""


PROGRAM = "__program__"
"""Name under which a rank loads the program that started it, which keeps the program's own main from running."""


@dataclass(frozen=True)
class Success:
    """A rank returned."""

    value: Any


@dataclass(frozen=True)
class Failure:
    """A rank raised or died.

    Attributes:
        exception: What it raised, if it can be raised again in the test process.
        text: The traceback, or how the rank died.
        died: It gave no answer. What other ranks raise at the same time is mostly the echo of that.
    """

    exception: Exception | None
    text: str
    died: bool = False


Reply = Success | Failure


def pack_task(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """One message that holds the call and where it is made from.

    Raises:
        ValueError: `fn` cannot be found by name in another process.
    """
    module = sys.modules[fn.__module__]
    if getattr(module, fn.__qualname__, None) is not fn:
        raise ValueError(
            f"{fn.__qualname__} has to be a function at the top level of its module, to be found on a rank"
        )
    place = {
        "module": fn.__module__,
        "file": getattr(module, "__file__", None),
        "name": fn.__qualname__,
        "path": list(sys.path),
        "cwd": str(Path.cwd()),
        "environment": {k: v for k, v in os.environ.items() if k not in PLACE_VARIABLES},
    }
    return pickle.dumps((place, pickle.dumps(args)))


def unpack_task(task: bytes) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function and its arguments, in this process moved to where the call was made."""
    place, packed_args = pickle.loads(task)
    sys.path.extend(entry for entry in place["path"] if entry not in sys.path)
    os.chdir(place["cwd"])
    for name in set(os.environ) - set(place["environment"]) - PLACE_VARIABLES:
        del os.environ[name]
    os.environ.update(place["environment"])
    function = getattr(_module(place["module"], place["file"]), place["name"])
    return function, pickle.loads(packed_args)


def _module(name: str, file: str | None) -> ModuleType:
    """The module of this name, by import if it can be imported, else from its file, as pytest loads test modules."""
    if name == "__main__":
        name = PROGRAM
    if name in sys.modules:
        return sys.modules[name]
    if name != PROGRAM:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            if file is None:
                raise
    assert file is not None
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
