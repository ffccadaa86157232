"""Command line of `clap-zero bench loader`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from clap_zero.data.remote_arguments import add_remote_arguments, check_bounds, read_policy
from clap_zero.errors import ConfigError
from clap_zero.figures_file import check_writable, write_figures

_MOST_WORKERS = 8


def add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `clap-zero bench loader`."""
    parser.add_argument(
        "shards",
        nargs="+",
        metavar="SHARDS",
        help="split directories, tars or brace patterns, as --data.train takes them",
    )
    parser.add_argument(
        "--seconds", type=float, default=10.0, metavar="S", help="how long to read, in seconds (%(default)s)"
    )
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help=f"loader processes, 0: this one (default: the cores of this machine, at most {_MOST_WORKERS})",
    )
    parser.add_argument(
        "--micro-batch",
        type=int,
        metavar="PAIRS",
        help="size of a batch (default: 32, or all samples if they are fewer)",
    )
    parser.add_argument(
        "--features", action="store_true", help="compute log-mels, too, on the GPU or else on this CPU with one thread"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there, too")
    same = parser.add_argument_group("as training would (the defaults are those of the run config)")
    same.add_argument(
        "--truncation", choices=("rand_trunc", "fusion"), default="rand_trunc", help="kind of model (%(default)s)"
    )
    same.add_argument("--seed", type=int, default=0, metavar="N", help="of order, crops and captions (%(default)s)")
    same.add_argument("--caption-key", default="text", metavar="KEY", help="key of the captions (%(default)s)")
    same.add_argument(
        "--max-seconds", type=float, default=60.0, metavar="S", help="longest part decoded, in seconds (%(default)s)"
    )
    same.add_argument("--shuffle-shards", type=int, default=16, metavar="N", help="shards mixed (%(default)s)")
    add_remote_arguments(parser)


def bench_from_args(args: argparse.Namespace) -> None:
    """Measures, prints the report and writes the JSON.

    Raises:
        ConfigError: an argument is out of range, or the JSON cannot be written.
        DataError: the data cannot be read; see `clap_zero.data.bench.bench_loader`.
    """
    if not 0 < args.seconds <= 86_400:
        raise ConfigError(f"--seconds {args.seconds:g}: more than 0 and at most 86400 is needed")
    if args.micro_batch is not None and args.micro_batch < 1:
        raise ConfigError(f"--micro-batch {args.micro_batch}: at least 1 is needed")
    if args.workers is not None and args.workers < 0:
        raise ConfigError(f"--workers {args.workers}: 0 or more is needed")
    check_bounds(args, **{name: name for name in ("max_seconds", "shuffle_shards", "caption_key")})
    check_writable(args.json)
    policy = read_policy(args)
    from clap_zero.data.bench import BenchOptions, bench_loader

    report = bench_loader(
        BenchOptions(
            shards=tuple(args.shards),
            seconds=args.seconds,
            workers=min(_MOST_WORKERS, len(os.sched_getaffinity(0))) if args.workers is None else args.workers,
            micro_batch=args.micro_batch,
            truncation=args.truncation,
            seed=args.seed,
            features=args.features,
            caption_key=args.caption_key,
            max_seconds=args.max_seconds,
            shuffle_shards=args.shuffle_shards,
            policy=policy,
        )
    )
    print("\n".join(report.lines()), flush=True)
    write_figures(args.json, report.record())
