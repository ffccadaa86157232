"""The command line of DeepSpeed's `deepspeed`, read without importing DeepSpeed.

A test compares the tables with DeepSpeed's own parser. An option that they do not know makes `read` return None: then
DeepSpeed is newer than this, and is left to itself.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

NUMBERS = ("num_nodes", "master_port", "node_rank", "ssh_port")
TEXTS = (
    *("master_addr", "launcher", "launcher_args", "enable_each_rank_log", "autotuning", "bind_core_list"),
    *("venv_script", "log_level"),
)
SWITCHES = (
    *("module", "no_python", "no_local_rank", "no_ssh", "no_ssh_check", "force_multi", "save_pid"),
    "bind_cores_to_rank",
)
SHORT = {"hostfile": "-H", "include": "-i", "exclude": "-e"}
MISPLACED = frozenset(("hostfile", "include", "exclude", "num_gpus", "num_accelerators", *NUMBERS, *TEXTS, *SWITCHES))
"""Options that belong before the module."""


@dataclass(frozen=True)
class LauncherOptions:
    """One `deepspeed` command.

    Attributes:
        given: Option -> value, of those that were typed.
        program: Module or script.
        arguments: What the program gets.
    """

    given: Mapping[str, Any]
    program: str
    arguments: tuple[str, ...] = field(default=())

    def get(self, name: str, default: Any = None) -> Any:
        """The value of an option, `default` where it was not typed."""
        return self.given.get(name, default)

    def with_options(self, **changes: Any) -> LauncherOptions:
        """A copy with some options set; None removes one."""
        merged = {**self.given, **changes}
        return replace(self, given={name: value for name, value in merged.items() if value is not None})

    def as_argv(self) -> list[str]:
        """The command line without the name of the launcher."""
        words = []
        for name, value in self.given.items():
            if value is True:
                words.append(f"--{name}")
            elif name != "module":
                words.append(f"--{name}={value}")
        return [*words, self.program, *self.arguments]


class _Refused(Exception):
    """DeepSpeed would refuse the command line, or knows an option that the tables lack."""


class _Parser(argparse.ArgumentParser):
    """Raises where argparse would print and end the process."""

    def error(self, message: str) -> NoReturn:
        raise _Refused(message)


def parser() -> argparse.ArgumentParser:
    """DeepSpeed's options, as its own parser has them; only what was typed appears in the result."""
    made = _Parser(add_help=False, argument_default=argparse.SUPPRESS)
    made.add_argument("--help", "-h", action="store_true")
    made.add_argument("--quiet", "-q", action="store_true")
    made.add_argument("--num_gpus", "--num_accelerators", dest="num_gpus", type=int)
    for name, short in SHORT.items():
        made.add_argument(short, f"--{name}")
    for name in NUMBERS:
        made.add_argument(f"--{name}", type=int)
    for name in TEXTS:
        made.add_argument(f"--{name}")
    for name in SWITCHES:
        made.add_argument(f"--{name}", action="store_true")
    made.add_argument("user_script")
    made.add_argument("user_args", nargs=argparse.REMAINDER)
    return made


def read(argv: Sequence[str]) -> LauncherOptions | None:
    """Split a command line of `deepspeed`, as DeepSpeed will.

    Args:
        argv: Without the name of the launcher, and with --module in place of -m.

    Returns:
        None where DeepSpeed would refuse it, or knows an option that this table lacks.
    """
    try:
        values = vars(parser().parse_args(list(argv)))
    except _Refused:
        return None
    if values.pop("help", False):
        return None
    program, arguments = values.pop("user_script"), values.pop("user_args", [])
    return LauncherOptions(values, program, tuple(arguments))


def misplaced(arguments: Sequence[str]) -> str | None:
    """The first option of the launcher among the arguments of the program, as it was typed; None without one."""
    for word in arguments:
        name, equals, _ = word.partition("=")
        if name.startswith("--") and name[2:].replace("-", "_") in MISPLACED:
            return name if equals else word
    return None
