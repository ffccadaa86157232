"""clap_zero.train as a script, for launchers that cannot start a module: srun and MPICH through DeepSpeed."""

from __future__ import annotations

import runpy
import sys

if __name__ == "__main__":
    # A script's own folder stands first in the search path, and would put our modules in the place of others.
    del sys.path[0]
    runpy.run_module("clap_zero.train", run_name="__main__", alter_sys=True)
