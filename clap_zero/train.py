"""What `-m clap_zero.train` runs: parse, preflight, build, fit, close.

Light at import: nothing that takes time comes before the process above this one is known.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from clap_zero.errors import EXIT_STOPPED
from clap_zero.phases import current, phase, raised_at, spent
from clap_zero.training.last_words import last_words
from clap_zero.training.say import say
from clap_zero.training.start_up import told_start

if TYPE_CHECKING:
    from clap_zero.hooks.watchdog import Watchdog

PARENT = os.getppid()
"""The process that started this one. Read first of all: it may die while the libraries are imported."""

END_S = 20.0
"""How long the last output and the clearing up may take."""

YIELD_TO_CAUSE_S = 3.0
"""A rank that only lost its peers ends this much later, so that the launcher reports the exit code of the cause."""


def run_and_exit(argv: list[str] | None = None) -> None:
    """Train, say in one line what went wrong, and end the process with the exit code of its kind.

    Args:
        argv: Command line without the program's name; None takes the process's own.
    """
    from clap_zero.data.processes import remove_leftovers
    from clap_zero.distributed import hub
    from clap_zero.distributed.place import report_exit_code
    from clap_zero.hooks.watchdog import Watchdog, end_at_the_latest
    from clap_zero.launching.entry import given

    arguments = given(argv)  # before the libraries that read the environment when they are imported
    if not {"--help", "-h"}.isdisjoint(arguments):
        from clap_zero.config.flags import help_text

        with contextlib.suppress(BrokenPipeError):  # `| head` has enough
            print(help_text(), end="", flush=True)
        os._exit(0)

    faulthandler.enable()  # what ends a process without Python, such as SIGBUS from a full /dev/shm, shows where
    report_exit_code(None)
    watchdog = Watchdog(parent=PARENT).start()
    try:
        code = _run(arguments, watchdog)
    except Exception as error:  # noqa: BLE001
        # The boundary of the process: whatever it is, it is shown, and the process must end.
        code = _report(error)
    except SystemExit as error:
        # argparse says itself what it wants to say, before the ranks meet.
        code = _report(error) if "rendezvous" in spent() else _code_of(error)
    if code in (0, EXIT_STOPPED):
        with phase("end"):
            hub.say_goodbye()
    report_exit_code(code)
    end_at_the_latest(END_S, exit_code=code)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a full disk or a closed pipe changes no exit code
            stream.flush()
    remove_leftovers()
    # Not sys.exit: what libraries do at exit (waiting for uploads or for a dead peer) must not keep a rank alive.
    os._exit(code)


def _run(argv: list[str], watchdog: Watchdog) -> int:
    """The run from its command line to its exit code; errors before the first step are raised."""
    # 1. The command line: nothing is started for a command that cannot run.
    with phase("imports"):
        from clap_zero.config.load import parse_command_line
        from clap_zero.distributed import world as ranks

        watchdog.take_signals()  # until now a signal ends this process: there is nothing to save
        has_gpu = ranks.has_gpu()
    command = parse_command_line(argv, has_gpu=has_gpu)

    # 2. All ranks meet.
    with phase("rendezvous"):
        limits = command.run.distributed
        world = ranks.init_distributed(timeout_s=limits.timeout_s, start_timeout_s=limits.start_timeout_s)
        watchdog.watch_ranks(world, limits=limits, run_dir=Path(str(command.run.run_dir)))

    # 3. Everything that can be known before a model is built is checked.
    with phase("imports"):
        from clap_zero.training.prepare import prepare
    with phase("preflight"):
        prepared = prepare(command, world=world)
    if prepared is None:
        ranks.teardown()
        return 0
    settled, lock = prepared

    # 4. The model, the data and the hooks are made and joined.
    with phase("imports"):
        from clap_zero.training.loop import Outcome
        from clap_zero.training.setup import build
    trainer = build(settled, world=world, stop_requested=watchdog.stop_requested)
    if world.is_main:
        say(told_start())

    # 5. Train.
    try:
        outcome = trainer.fit()
    except (Exception, SystemExit) as error:  # noqa: BLE001
        # Said before anything is closed: that may wait for the network.
        code = _report(error)
        trainer.close()
        return code

    # 6. Close.
    with phase("end"):
        trainer.close()
        if outcome is Outcome.DONE and world.is_main:
            settled.directory.mark_finished(trainer.state.step)
        lock.release()
        ranks.teardown()
    return 0 if outcome is Outcome.DONE else EXIT_STOPPED


def _report(error: BaseException) -> int:
    """Say what went wrong, once for the job where all ranks know it.

    Returns:
        The exit code of its kind.
    """
    from clap_zero.distributed import hub
    from clap_zero.distributed.place import describe_process, speaks_for_host

    words = last_words(error, process=describe_process(), speaks_for_host=speaks_for_host())
    if words.lost_contact:
        time.sleep(YIELD_TO_CAUSE_S)  # the watchdog ends this process meanwhile where the hub knows the cause
    hub.announce_failure(f"in {raised_at(error)}: {words.message}", exit_code=words.exit_code)
    if not words.said_by_others:
        if words.details:
            say(words.details, file=sys.stderr)
        say(words.line, file=sys.stderr)
    return words.exit_code


def _code_of(error: SystemExit) -> int:
    """What Python makes of `sys.exit`: a text is printed, and counts as 1."""
    from clap_zero.distributed import hub

    if isinstance(error.code, str):
        say(error.code, file=sys.stderr)
    code = error.code if isinstance(error.code, int) else int(error.code is not None)
    if code:
        hub.announce_failure(f"in {current()}: it says itself why", exit_code=code)
    return code


if __name__ == "__main__":
    run_and_exit()
