"""What `-m clap_zero.train` runs: parse, preflight, build, fit, close.

Light at import: nothing that takes time comes before the process above this one is known.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from typing import TYPE_CHECKING

from clap_zero.errors import EXIT_STOPPED, ClapZeroError, ConfigError, LaunchError, first_line
from clap_zero.training.say import say

if TYPE_CHECKING:
    from clap_zero.hooks.watchdog import Watchdog

PARENT = os.getppid()
"""The process that started this one. Read first of all: it may die while the libraries are imported."""

YIELD_TO_CAUSE_S = 3.0
"""A rank that only lost its peers ends this much later, so that the launcher reports the exit code of the cause."""


def run_and_exit(argv: list[str] | None = None) -> None:
    """Train, say in one line what went wrong, and end the process with the exit code of its kind.

    Args:
        argv: Command line without the program's name; None takes the process's own.
    """
    from clap_zero.data.processes import remove_leftovers
    from clap_zero.launching.arguments import unquote
    from clap_zero.launching.environment import restore

    restore()  # before the libraries that read the environment when they are imported
    from clap_zero.distributed.world import report_exit_code
    from clap_zero.hooks.watchdog import Watchdog

    report_exit_code(None)
    try:
        code = _run(unquote(sys.argv[1:] if argv is None else argv), Watchdog(parent=PARENT).start())
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0
    except Exception as error:  # noqa: BLE001
        # The boundary of the process: whatever it is, it is shown, and the process must end.
        code = _report(error)
    report_exit_code(code)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a full disk or a closed pipe changes no exit code
            stream.flush()
    remove_leftovers()
    # Not sys.exit: what libraries do at exit (waiting for uploads or for a dead peer) must not keep a rank alive.
    os._exit(code)


def _run(argv: list[str], watchdog: Watchdog) -> int:
    """The run from its command line to its exit code; errors before the first step are raised."""
    from clap_zero.config.load import parse_command_line
    from clap_zero.distributed import world as ranks

    # 1. The command line: nothing is started for a command that cannot run.
    asks_for_help = not {"--help", "-h"}.isdisjoint(argv)
    command = parse_command_line(argv, has_gpu=not asks_for_help and ranks.has_gpu())

    # 2. All ranks meet.
    world = ranks.init_distributed(timeout_s=command.run.distributed.timeout_s)

    # 3. Everything that can be known before a model is built is checked.
    from clap_zero.training.prepare import prepare

    prepared = prepare(command, world=world)
    if prepared is None:
        ranks.teardown()
        return 0
    settled, lock = prepared

    # 4. The model, the data and the hooks are made and joined.
    from clap_zero.training.loop import Outcome
    from clap_zero.training.setup import build

    trainer = build(settled, world=world, stop_requested=watchdog.stop_requested)

    # 5. Train.
    try:
        outcome = trainer.fit()
    except Exception as error:  # noqa: BLE001
        # Said before anything is closed: that may wait for the network.
        code = _report(error)
        trainer.close()
        return code

    # 6. Close.
    trainer.close()
    if outcome is Outcome.DONE and world.is_main:
        settled.directory.mark_finished(trainer.state.step)
    lock.release()
    ranks.teardown()
    return 0 if outcome is Outcome.DONE else EXIT_STOPPED


def _report(error: Exception) -> int:
    """Say what went wrong, once for the job where all ranks know it.

    Returns:
        The exit code of its kind.
    """
    from clap_zero.distributed.world import describe_process, speaks_for_host

    where = describe_process()
    prefix = f"clap_zero{f' [{where}]' if where else ''}: error: "
    if isinstance(error, ClapZeroError):
        # A wrong configuration is the same for all ranks of a host.
        if not (error.reported_elsewhere or (isinstance(error, ConfigError) and not speaks_for_host())):
            say(f"{prefix}{error}", file=sys.stderr)
        return error.exit_code
    if _is_lost_contact(error):
        reason = first_line(error)[:200]
        text = f"{prefix}lost contact with the other ranks ({reason}); another rank's message has the cause"
        say(text, file=sys.stderr)
        time.sleep(YIELD_TO_CAUSE_S)
        return LaunchError.exit_code
    say("".join(traceback.format_exception(error)), file=sys.stderr)
    return 1


def _is_lost_contact(error: Exception) -> bool:
    """Whether an error of a collective says no more than that another rank is gone."""
    text = f"{type(error).__name__} {error}"
    signs = ("Connection closed by peer", "Connection reset by peer", "DistBackendError", "DistNetworkError", "gloo")
    return isinstance(error, RuntimeError) and any(sign in text for sign in signs)


if __name__ == "__main__":
    run_and_exit()
