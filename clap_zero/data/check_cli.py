"""Command line of `clap-zero check`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from clap_zero.data.remote_arguments import add_remote_arguments, check_bounds, read_policy
from clap_zero.errors import ConfigError


def add_check_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `clap-zero check`."""
    parser.add_argument(
        "shards",
        nargs="+",
        metavar="SHARDS",
        help="split directories, tars or brace patterns, as --data.train takes them",
    )
    parser.add_argument("--workers", type=int, metavar="N", help="processes (default: the cores of this machine)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all findings and the sums there, too")
    parser.add_argument("--rewrite-index", action="store_true", help="replace sizes.json, index.json and spans.npy")
    parser.add_argument("--index-out", type=Path, metavar="DIR", help="where the indexes of remote directories go")
    parser.add_argument("--no-index", action="store_true", help="write no index, not even where there is none")
    parser.add_argument("--no-progress", action="store_true", help="no progress bar")
    same = parser.add_argument_group("as training would (the defaults are those of the run config)")
    same.add_argument("--caption-key", default="text", metavar="KEY", help="key of the captions (%(default)s)")
    same.add_argument(
        "--tags",
        choices=("never", "missing", "always"),
        default="never",
        help="whether a sample's tags stand in for captions (%(default)s)",
    )
    same.add_argument(
        "--truncation",
        choices=("fusion", "rand_trunc"),
        help="kind of model, which a stored log-mel must fit (default: the kind that it was made for)",
    )
    same.add_argument(
        "--max-seconds", type=float, default=60.0, metavar="S", help="longest part decoded, in seconds (%(default)s)"
    )
    same.add_argument(
        "--max-caption-tokens", type=int, default=77, metavar="N", help="longest caption in tokens (%(default)s)"
    )
    same.add_argument(
        "--max-bad-fraction", type=float, default=0.05, metavar="F", help="unusable part of an epoch (%(default)s)"
    )
    same.add_argument(
        "--blacklist", action="append", default=[], metavar="FILE", help="keys to leave out; may be repeated"
    )
    add_remote_arguments(parser)


def check_from_args(args: argparse.Namespace) -> int:
    """Checks, prints the findings and the sums.

    Returns:
        0: training can read these shards.

    Raises:
        ConfigError: an argument is out of range.
        DataError: training on these shards would stop; see `clap_zero.data.check.check`.
    """
    workers = len(os.sched_getaffinity(0)) if args.workers is None else args.workers
    if workers < 1:
        raise ConfigError(f"--workers {workers}: at least 1 is needed")
    same = ("max_seconds", "max_caption_tokens", "max_bad_fraction", "caption_key")
    check_bounds(args, **{name: name for name in same})
    from clap_zero.data.captions import CaptionRule
    from clap_zero.data.check import CheckOptions, check

    options = CheckOptions(
        shards=tuple(args.shards),
        workers=workers,
        rule=CaptionRule(caption_key=args.caption_key, tags=args.tags),
        truncation=args.truncation,
        max_seconds=args.max_seconds,
        max_caption_tokens=args.max_caption_tokens,
        max_bad_fraction=args.max_bad_fraction,
        blacklist=tuple(args.blacklist),
        policy=read_policy(args),
        json_path=args.json,
        write_index=not args.no_index,
        rewrite_index=args.rewrite_index,
        index_out=args.index_out,
        progress=not args.no_progress,
    )
    report = check(options)
    print("\n".join(report.lines()), flush=True)
    report.raise_if_stopped()
    return 0
