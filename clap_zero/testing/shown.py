"""What a rank was given, as one line of JSON: its arguments, its place, and variables. Run by launchers in tests.

Arguments: the names of variables come first, up to `--`; what follows is only shown.
"""

from __future__ import annotations

import json
import os
import socket

from clap_zero.launching.entry import given

PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR")


def main() -> None:
    """Print the line in one piece, since ranks share an output."""
    arguments = [word for word in given() if not word.startswith("--local_rank=")]
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    variables = {name: os.environ.get(name) for name in (*PLACE, *arguments[:cut])}
    shown = {"host": socket.gethostname(), "arguments": arguments[cut + 1 :], "variables": variables}
    os.write(1, f"shown {json.dumps(shown)}\n".encode())


if __name__ == "__main__":
    main()
