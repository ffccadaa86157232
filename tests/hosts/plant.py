"""A fault planted in a process: a function that raises on one host, from some call on.

Copied as `sitecustomize.py` into the directory of a job, which Python finds there because DeepSpeed puts that directory
on PYTHONPATH; `plant.json` beside it says where: {"host", "module", "function", "after", "message"}.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import socket
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any


class Plant(MetaPathFinder):
    """Lets the module be found as usual, and replaces its function once it is there."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan = plan
        self.calls = 0

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self.plan["module"]:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        run = spec.loader.exec_module

        def run_and_plant(module: ModuleType) -> None:
            run(module)
            self.replace(module)

        spec.loader.exec_module = run_and_plant  # type: ignore[method-assign]
        return spec

    def replace(self, module: ModuleType) -> None:
        original = getattr(module, self.plan["function"])

        @functools.wraps(original)  # also its name, by which it is sent to worker processes
        def planted(*args: object, **named: object) -> object:
            self.calls += 1
            if self.calls > self.plan["after"]:
                raise RuntimeError(self.plan["message"])
            return original(*args, **named)

        setattr(module, self.plan["function"], planted)


_file = Path(__file__).with_name("plant.json")
if _file.exists() and (_plan := json.loads(_file.read_text()))["host"] == socket.gethostname():
    sys.meta_path.insert(0, Plant(_plan))
