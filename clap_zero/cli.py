"""The `clap-zero` command. Thin: each subcommand parses its arguments and calls one function of the package.

Nothing heavy is imported before a subcommand is known, so that `--help` and `--version` answer at once.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import clap_zero
from clap_zero.errors import ClapZeroError, ConfigError

INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + SIGINT, as shells report it."""

COMMANDS = {
    "pack": "write audio and captions into tar shards",
    "check": "read shards as training would, print every fault, write their index",
    "train": "train a model; `clap-zero train --help` lists every key",
    "eval": "retrieval figures of a run on its held-out pairs",
    "export": "write a run's model as a Hugging Face directory",
    "check-config": "check a command line of `train` and print its arithmetic, without starting anything",
    "doctor": "look for what would spoil a run, here or on all nodes of a hostfile, without starting one",
    "bench": "measure how fast a part is: `clap-zero bench loader SHARDS` or `clap-zero bench objective`",
}

_USAGE = """\
usage: clap-zero COMMAND ...

Trains CLAP audio-text models with DeepSpeed ZeRO.

commands:
{commands}

  --help      print this, or after a command what that command takes
  --version   print the version
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand.

    Args:
        argv: arguments after the program's name; None takes the process's own.

    Returns:
        The exit code; errors that a user can act on are one line each on stderr.
    """
    try:
        code = _dispatch(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except ClapZeroError as error:
        print("\n".join(f"clap-zero: error: {line}" for line in str(error).splitlines()), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("clap-zero: interrupted", file=sys.stderr)
        return INTERRUPTED
    except OSError as error:
        # An error of a file has its name. These are of standard output: a full disk, a pipe to `head`.
        if error.filename is not None or error.errno not in (errno.EPIPE, errno.ENOSPC, errno.EIO):
            raise
        _drop_output()
        print(f"clap-zero: error: the output cannot be written: {error.strerror or error}", file=sys.stderr)
        return ConfigError.exit_code


def _drop_output() -> None:
    """Has what is left for standard output go nowhere: Python writes it once more at its end, and would complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("--help", "-h"):
        width = max(map(len, COMMANDS))
        print(_USAGE.format(commands="\n".join(f"  {name:{width}}  {text}" for name, text in COMMANDS.items())), end="")
        return 0 if argv else ConfigError.exit_code
    if argv[0] == "--version":
        print(f"clap-zero {clap_zero.__version__}")
        return 0
    name, rest = argv[0].replace("_", "-"), argv[1:]
    runners: dict[str, Callable[[list[str]], int]] = {
        "pack": _pack,
        "check": _check,
        "train": _train,
        "eval": _eval,
        "export": _export,
        "check-config": _check_config,
        "doctor": _doctor,
        "bench": _bench,
    }
    if name not in runners:
        close = difflib.get_close_matches(name, runners, n=1, cutoff=0.4)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(runners)}"
        raise ConfigError(f"unknown command {argv[0]}: {hint}")
    return runners[name](rest)


class _Parser(argparse.ArgumentParser):
    """argparse whose complaints are ConfigErrors, and to which `--a_b` and `--a-b` are the same flag."""

    def __init__(self, command: str, description: str = "") -> None:
        """description: "": that of the command."""
        super().__init__(prog=f"clap-zero {command}", description=description or COMMANDS[command], allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message} ({self.prog} --help says what it takes)")

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """The arguments; unknown flags are told first, all of them: what is then missing is often what they meant."""
        flags = [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]
        tokens, unknown = [], []
        for token in argv:
            name, equals, value = token.partition("=")
            is_flag = token.startswith("--") and token != "--"
            tokens.append(f"{name.replace('_', '-')}{equals}{value}" if is_flag else token)
            if is_flag and name.replace("_", "-") not in flags:
                unknown.append(name)
        if unknown:
            self.error(", ".join(f"unknown argument {name}{_meant(name, flags)}" for name in unknown))
        known, stray = self.parse_known_args(tokens)
        if stray:
            self.error(f"unexpected argument {stray[0]}" + (f" and {len(stray) - 1} more" if len(stray) > 1 else ""))
        return known


def _meant(name: str, flags: Sequence[str]) -> str:
    close = difflib.get_close_matches(name.replace("_", "-"), flags, n=1)
    return f": did you mean {close[0]}?" if close else ""


def _pack(argv: list[str]) -> int:
    from clap_zero.data.pack_cli import add_pack_arguments, pack_from_args

    parser = _Parser("pack")
    add_pack_arguments(parser)
    pack_from_args(parser.read(argv))
    return 0


def _check(argv: list[str]) -> int:
    from clap_zero.data.check_cli import add_check_arguments, check_from_args

    parser = _Parser("check")
    add_check_arguments(parser)
    return check_from_args(parser.read(argv))


def _bench(argv: list[str]) -> int:
    part = argv[0] if argv else ""
    if part == "loader":
        from clap_zero.data.bench_cli import add_bench_arguments, bench_from_args

        parser = _Parser(
            "bench loader", "Reads shards as training would and prints pairs per second and core, by stage."
        )
        add_bench_arguments(parser)
        bench_from_args(parser.read(argv[1:]))
    elif part == "objective":
        from clap_zero.objective import bench

        parser = _Parser("bench objective", "Measures time and memory of the contrast beside the dense form.")
        bench.add_bench_arguments(parser)
        bench.bench_from_args(parser.read(argv[1:]))
    elif part in ("--help", "-h"):
        print(f"usage: clap-zero bench loader|objective ...\n\n{COMMANDS['bench']}; each has its own --help")
    else:
        raise ConfigError(f"{' '.join(['clap-zero bench', *argv[:1]])}: loader or objective has to follow bench")
    return 0


def _train(argv: list[str]) -> int:
    from clap_zero.train import run_and_exit

    run_and_exit(argv)  # ends the process itself: a rank must not outlive its failure
    return 0


def _eval(argv: list[str]) -> int:
    parser = _Parser("eval")
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    parser.add_argument("--step", default="latest", metavar="N|latest|best", help="checkpoint (default: %(default)s)")
    parser.add_argument(
        "--val", action="append", metavar="PATTERN", help="other shards than the run's; may be repeated"
    )
    parser.add_argument("--batch-size", type=int, metavar="N", help="clips at once (default: the run's)")
    args = parser.read(argv)
    step = _step(args.step)
    if args.batch_size is not None and args.batch_size < 1:
        raise ConfigError(f"--batch-size {args.batch_size}: at least 1 is needed")
    from clap_zero.evaluation.from_run import eval_run

    eval_run(args.run, step=step, val=args.val, batch_size=args.batch_size)
    return 0


def _export(argv: list[str]) -> int:
    parser = _Parser("export")
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    parser.add_argument("out", type=Path, metavar="DIR", help="directory to write, for ClapModel.from_pretrained")
    parser.add_argument("--step", default="latest", metavar="N|latest|best", help="checkpoint (default: %(default)s)")
    parser.add_argument("--overwrite", action="store_true", help="replace what is in DIR")
    args = parser.read(argv)
    step = _step(args.step)
    from clap_zero.checkpoint.export import export_run

    print(f"exported to {export_run(args.run, args.out, step=step, overwrite=args.overwrite)}")
    return 0


def _step(text: str) -> str | int:
    if text in ("latest", "best"):
        return text
    if not text.isdecimal():
        raise ConfigError(f"--step {text}: a step's number, latest or best is needed")
    return int(text)


def _check_config(argv: list[str]) -> int:
    from clap_zero.planning import check_config

    if any(token in ("--help", "-h") for token in argv):
        print(check_config.HELP, end="")
    elif "--schema" in argv:
        from clap_zero.planning.json_schema import schema_text

        if argv != ["--schema"]:
            raise ConfigError("--schema stands alone: clap-zero check-config --schema > run_config.schema.json")
        print(schema_text(), end="")
    else:
        print("\n".join(check_config.told(argv, device_here=_device_here)))
    return 0


def _doctor(argv: list[str]) -> int:
    from clap_zero.preflight import doctor

    return doctor.run(argv)


def _device_here() -> str:
    from clap_zero.distributed.world import has_gpu

    return "cuda" if has_gpu() else "cpu"


if __name__ == "__main__":
    sys.exit(main())
