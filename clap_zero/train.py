"""What `-m clap_zero.train` runs: parse, preflight, build, fit, close.

Light at import: the loader's worker processes import this module again, as the main module of their parent.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from typing import TYPE_CHECKING

from clap_zero.errors import EXIT_STOPPED, ClapZeroError, ConfigError, LaunchError

if TYPE_CHECKING:
    from clap_zero.hooks.watchdog import Watchdog

YIELD_TO_CAUSE_S = 3.0
"""A rank that only lost its peers ends this much later, so that the launcher reports the exit code of the cause."""


def main(argv: list[str] | None = None) -> int:
    """Train, and return the exit code.

    Args:
        argv: Command line without the program's name; None takes the process's own.
    """
    from clap_zero.hooks.watchdog import Watchdog

    watchdog = Watchdog().start()
    try:
        return _run(sys.argv[1:] if argv is None else argv, watchdog)
    finally:
        watchdog.close()


def _run(argv: list[str], watchdog: Watchdog) -> int:
    from clap_zero.config.load import parse_command_line
    from clap_zero.distributed import world as ranks

    # 1. The command line: nothing is started for a command that cannot run.
    command = parse_command_line(argv, has_gpu="--help" not in argv and ranks.has_gpu())

    # 2. All ranks meet.
    world = ranks.init_distributed(timeout_s=command.run.distributed.timeout_s)
    try:
        # 3. Everything that can be known before a model is built is checked.
        from clap_zero.training.prepare import prepare

        prepared = prepare(command, world=world)
        if prepared is None:
            return 0
        settled, lock = prepared
        # 4. The model, the data and the hooks are made and joined.
        from clap_zero.training.loop import Outcome
        from clap_zero.training.setup import build

        trainer = build(settled, world=world, stop_requested=watchdog.stop_requested)
        # 5. Train.
        try:
            outcome = trainer.fit()
        finally:
            trainer.close()
        # 6. Close.
        if outcome is Outcome.STOPPED:
            return EXIT_STOPPED
        if world.is_main:
            settled.directory.mark_finished(trainer.state.step)
        lock.release()
        return 0
    finally:
        ranks.teardown()


def run_and_exit(argv: list[str] | None = None) -> None:
    """Run `main`, say in one line what went wrong, and end the process with the exit code of its kind."""
    from clap_zero.distributed.world import is_rank_0, report_exit_code

    report_exit_code(None)
    code = 1
    try:
        code = main(argv)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except ClapZeroError as error:
        code = error.exit_code
        # A wrong configuration is the same on all ranks; rank 0 says it.
        if not (error.reported_elsewhere or (isinstance(error, ConfigError) and not is_rank_0())):
            _say(f"error: {error}")
    except KeyboardInterrupt:
        code = 130
    except Exception as error:  # noqa: BLE001
        # The boundary of the process: whatever it is, it is shown whole, and the process must end.
        if _is_lost_contact(error):
            _say(
                f"error: lost contact with the other ranks ({_first_line(error)}); another rank's message has the cause"
            )
            time.sleep(YIELD_TO_CAUSE_S)
            code = LaunchError.exit_code
        else:
            traceback.print_exc()
    report_exit_code(code)
    sys.stdout.flush()
    sys.stderr.flush()
    if code not in (0, EXIT_STOPPED):
        # Threads of libraries (collectives that wait for a dead peer, loaders) must not keep a failed rank alive.
        os._exit(code)
    sys.exit(code)


def _say(text: str) -> None:
    from clap_zero.distributed.world import describe_process

    where = describe_process()
    print(f"clap_zero{f' [{where}]' if where else ''}: {text}", file=sys.stderr)


def _is_lost_contact(error: BaseException) -> bool:
    """Whether an error of a collective says no more than that another rank is gone."""
    text = f"{type(error).__name__} {error}"
    signs = ("Connection closed by peer", "Connection reset by peer", "DistBackendError", "DistNetworkError", "gloo")
    return any(sign in text for sign in signs)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


if __name__ == "__main__":
    run_and_exit()
