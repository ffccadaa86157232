"""The training program as one rank, with an end planted into it: `early_rank.py RANK HOW MODULE[/FUNCTION] FLAGS`.

On that rank (or `all`) the import of MODULE, or its FUNCTION, raises (`raise`), leaves (`exit`), is killed (`kill`) or
gets a SIGTERM and goes on (`term`). Nobody launched the ranks together, so that nobody ends one because another has
ended.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from clap_zero.train import run_and_exit


class Plant(MetaPathFinder):
    """Ends the process at the import of a module, or puts the end into the place of its function."""

    def __init__(self, how: str, place: str) -> None:
        self.how = how
        self.module, _, self.function = place.partition("/")

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self.module:
            return None
        sys.meta_path.remove(self)
        if not self.function:
            self.end()
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        run = spec.loader.exec_module

        def run_and_plant(module: ModuleType) -> None:
            run(module)
            assert hasattr(module, self.function)
            setattr(module, self.function, partial(self.end, getattr(module, self.function)))

        spec.loader.exec_module = run_and_plant  # type: ignore[method-assign]
        return spec

    def end(self, usual: Callable[..., Any] | None = None, *args: Any, **named: Any) -> Any:
        Path(os.environ["ENDED_AT"]).write_text(str(time.time()))
        if self.how == "exit":
            os._exit(9)
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "term" and usual is not None:
            os.kill(os.getpid(), signal.SIGTERM)
            return usual(*args, **named)
        raise ImportError("libcudart.so.13: cannot open shared object file")


rank, how, place = sys.argv[1:4]
if rank in ("all", os.environ["RANK"]):
    sys.meta_path.insert(0, Plant(how, place))
run_and_exit(sys.argv[4:])
