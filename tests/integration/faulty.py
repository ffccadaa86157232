"""A training rank with a fault, for the real launcher: `deepspeed --num_gpus 2 faulty.py FAULT RANK [train flags]`.

DeepSpeed puts `--local_rank=N` before the script's own words.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

AT_STEP = 3


def replaced(owner: Any, name: str, fault: Callable[[], None], *, at_step: int = 0) -> None:
    """Has `fault` happen in place of a call, from a step on."""
    from clap_zero import phases

    usual = getattr(owner, name)

    def changed(*args: Any, **kwargs: Any) -> Any:
        if phases.current().step >= at_step:
            fault()
        return usual(*args, **kwargs)

    setattr(owner, name, changed)


def leave() -> None:
    sys.exit(3)


def fail() -> None:
    raise RuntimeError("no such layer")


def exhaust() -> None:
    import torch

    torch.empty(1 << 50)


def burn() -> None:
    until = time.thread_time() + 0.5
    while time.thread_time() < until:
        pass


def plant(fault: str) -> None:
    """The faults: where they happen, and what happens."""
    from clap_zero.training import engine, passes, setup

    if fault == "exit":
        replaced(passes.Forward, "inputs", leave, at_step=AT_STEP)
    elif fault == "build":
        replaced(setup, "build_model", fail)
    elif fault == "memory":
        replaced(engine.Engine, "_step", exhaust, at_step=AT_STEP)
    elif fault == "slow":
        replaced(passes.Forward, "inputs", burn, at_step=1)
    else:
        assert fault == "none", fault


def main() -> None:
    from clap_zero import train

    words = [word for word in sys.argv[1:] if not word.startswith("--local_rank")]
    fault, rank, *flags = words
    if os.environ["RANK"] == rank:
        plant(fault)
    train.run_and_exit(flags)


if __name__ == "__main__":
    main()
