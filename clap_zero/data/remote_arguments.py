"""The command-line arguments that say how remote shards are read, alike for all commands that read shards."""

from __future__ import annotations

import argparse

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


def read_policy(args: argparse.Namespace) -> ReadPolicy:
    """The policy that the arguments stand for.

    Raises:
        ConfigError: a number is out of range.
    """
    if args.cache_bytes <= 0:
        raise ConfigError(f"--cache-bytes {args.cache_bytes}: more than 0 is needed")
    if not args.timeout_s > 0:
        raise ConfigError(f"--timeout-s {args.timeout_s:g}: more than 0 is needed")
    if args.retries < 0:
        raise ConfigError(f"--retries {args.retries}: 0 or more is needed")
    return ReadPolicy(
        cache_dir=args.cache_dir,
        cache_bytes=args.cache_bytes,
        timeout_s=args.timeout_s,
        retries=args.retries,
        allow_pipe=args.allow_pipe,
        missing=args.missing_shards,
    )
