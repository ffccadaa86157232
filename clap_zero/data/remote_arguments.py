"""The command-line arguments that say how remote shards are read, alike for all commands that read shards."""

from __future__ import annotations

import argparse

from pydantic import ValidationError

from clap_zero.config.data import DataSection
from clap_zero.data.places import ReadPolicy
from clap_zero.errors import ConfigError


def add_remote_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that `read_policy` reads; names and defaults are those of the run config."""
    remote = parser.add_argument_group("remote shards")
    remote.add_argument("--cache-dir", metavar="DIR", help="where shards are kept (default: ~/.cache/clap_zero/shards)")
    remote.add_argument(
        "--cache-bytes", type=int, default=ReadPolicy.cache_bytes, metavar="N", help="its size (%(default)s)"
    )
    remote.add_argument(
        "--timeout-s", type=float, default=ReadPolicy.timeout_s, metavar="S", help="a source stalls after (%(default)s)"
    )
    remote.add_argument(
        "--retries", type=int, default=ReadPolicy.retries, metavar="N", help="tries again (%(default)s)"
    )
    remote.add_argument("--missing-shards", choices=("stop", "skip"), default="stop", help="(default: %(default)s)")
    remote.add_argument("--allow-pipe", action="store_true", help="let SHARDS of the form pipe:COMMAND be run")


def check_bounds(args: argparse.Namespace, **keys: str) -> None:
    """Refuses what the run config refuses.

    Args:
        args: the arguments.
        keys: name of an argument -> the key of the `data` section that has the same meaning.

    Raises:
        ConfigError: a value is out of range.
    """
    for name, of_config in keys.items():
        value = getattr(args, name)
        try:
            DataSection.model_validate({of_config: value})
        except ValidationError as error:
            reason = error.errors()[0]["msg"].removeprefix("Input ").removeprefix("String ")
            text = f"{value:g}" if isinstance(value, float) else value
            raise ConfigError(f"--{name.replace('_', '-')} {text}: it {reason}, as data.{of_config}") from error


def read_policy(args: argparse.Namespace) -> ReadPolicy:
    """The policy that the arguments stand for.

    Raises:
        ConfigError: a number is out of range.
    """
    check_bounds(args, cache_bytes="cache_bytes", timeout_s="remote_timeout_s", retries="remote_retries")
    return ReadPolicy(
        cache_dir=args.cache_dir,
        cache_bytes=args.cache_bytes,
        timeout_s=args.timeout_s,
        retries=args.retries,
        allow_pipe=args.allow_pipe,
        missing=args.missing_shards,
    )
