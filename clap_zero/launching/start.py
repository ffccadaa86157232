"""What the .pth of the package calls while Python starts DeepSpeed's `deepspeed`, before DeepSpeed is imported.

Here an exception would be printed and forgotten: what ends the command has to end the process.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import MutableSequence
from pathlib import Path

from clap_zero.errors import ClapZeroError, LaunchError
from clap_zero.launching import leftovers

_ALONE = (
    *("--module", "--no_python", "--no_local_rank", "--no_ssh", "--no_ssh_check", "--force_multi", "--save_pid"),
    *("--bind_cores_to_rank", "--quiet", "--help", "-q", "-h"),
)
"""Options of `deepspeed` without a value; argparse takes beginnings of them, too."""
_INTERRUPTED = 130


def put_right(argv: MutableSequence[str]) -> None:
    """Make `-m` mean --module, and check a command that starts one of our modules.

    Ends the process with one line where the command cannot run, or cannot be checked.

    Args:
        argv: `sys.argv`, changed in place. A command line of anything else than DeepSpeed's program stays.
    """
    if not is_deepspeed(argv[0]):
        return
    teach(argv)
    if "--module" not in argv or not any(word == "clap_zero" or word.startswith("clap_zero.") for word in argv):
        return
    try:
        from clap_zero.launching.guard import protect

        protect(argv)
    except ClapZeroError as error:
        _end(str(error), error.exit_code)
    except KeyboardInterrupt:
        _end("interrupted; nothing was started", _INTERRUPTED)
    except Exception as error:  # noqa: BLE001
        # The boundary: DeepSpeed would go on with a command and an environment that nobody has checked.
        _end(f"the command could not be checked: {_told(error)}; nothing was started", LaunchError.exit_code)


def is_deepspeed(program: str) -> bool:
    """Whether a program is the one that comes with DeepSpeed, by its text."""
    try:
        with Path(program).open("rb") as script:
            return b"deepspeed.launcher.runner" in script.read(4096)
    except (OSError, ValueError):
        return False


def teach(argv: MutableSequence[str]) -> None:
    """Put --module in the place of the `-m` that stands before the module; an `-m` after it stays."""
    place = 1
    while place < len(argv) and len(argv[place]) > 1 and argv[place][0] == "-" and argv[place] != "--":
        option = argv[place]
        if option == "--module":
            return
        if option == "-m":
            if place + 1 < len(argv):
                argv[place] = "--module"
            return
        has_value = "=" in option or (option[1] != "-" and len(option) > 2)
        alone = has_value or any(flag.startswith(option) for flag in _ALONE)
        place += 1 if alone else 2


def _told(error: Exception) -> str:
    """Its kind and place, without its text: values of variables may be in it. An error of a file has its name."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    reason = ""
    if isinstance(error, OSError) and error.strerror:
        reason = f" ({error.strerror}{f': {error.filename}' if error.filename else ''})"
    return f"{type(error).__name__}{reason} in {Path(last.filename).name}:{last.lineno}"


def _end(text: str, code: int) -> None:
    leftovers.remove_all()
    sys.stdout.flush()
    print("\n".join(f"clap_zero: error: {line}" for line in text.split("\n")), file=sys.stderr, flush=True)
    os._exit(code)
