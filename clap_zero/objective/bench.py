"""`clap-zero bench objective`: time and memory of the chunked objective beside the dense one, as a table."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
from pathlib import Path

from clap_zero.errors import ConfigError
from clap_zero.figures_file import check_writable, write_figures
from clap_zero.objective.bench_case import CHUNKED, Measured, measure, opposed_pairs
from clap_zero.oom import is_out_of_memory

MOST_THREADS = 4096
LARGEST_DENSE = 16_384
"""Pairs up to which the dense forms are measured: from there on they take tens of gigabytes."""


def add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `clap-zero bench objective`."""
    parser.add_argument(
        "--sizes",
        metavar="N,N,...",
        default="2048,4096,8192,16384",
        help="batch sizes in pairs, with commas (%(default)s)",
    )
    parser.add_argument("--width", metavar="N", type=int, default=512, help="of the embeddings (%(default)s)")
    parser.add_argument(
        "--rounds",
        metavar="N",
        type=int,
        default=3,
        help="runs of each form, alternating; medians are printed (%(default)s)",
    )
    parser.add_argument("--threads", metavar="N", type=int, default=0, help="of torch; 0 takes all cores (%(default)s)")
    parser.add_argument(
        "--rank-of",
        metavar="N",
        type=int,
        default=16,
        help="ranks that share the largest batch; 0 leaves this out (%(default)s)",
    )
    parser.add_argument(
        "--rank-pairs",
        metavar="PAIRS",
        type=int,
        default=65_536,
        help="size of the batch that they share, in pairs (%(default)s)",
    )
    parser.add_argument("--json", metavar="FILE", type=Path, default=None, help="file for the figures")


def bench_from_args(args: argparse.Namespace) -> None:
    """Measures and prints.

    Raises:
        ConfigError: A number that makes no sense.
    """
    try:
        sizes = [int(size) for size in args.sizes.split(",")]
    except ValueError as error:
        raise ConfigError(f"--sizes {args.sizes}: must be whole numbers with commas, as in 2048,16384") from error
    if not 1 <= min(*sizes, args.width, args.rounds) <= max(*sizes, args.width, args.rank_pairs) <= 10**9:
        raise ConfigError("--sizes, --width and --rounds must be at least 1, and none above 10^9")
    if not 0 <= args.threads <= MOST_THREADS:
        raise ConfigError(f"--threads {args.threads}: 0 (all cores) to {MOST_THREADS} are possible")
    if args.rank_of < 0 or (args.rank_of and (args.rank_pairs < 1 or args.rank_pairs % args.rank_of)):
        raise ConfigError(
            f"--rank-pairs {args.rank_pairs} must be a multiple of --rank-of {args.rank_of}, both above 0 "
            "(--rank-of 0 leaves this part out)"
        )
    check_writable(args.json)
    threads = args.threads or len(os.sched_getaffinity(0))
    figures: dict[str, object] = {"width": args.width, "threads": threads, "rounds": args.rounds}
    print(f"forward and backward, d = {args.width}, float32, {threads} threads, median of {args.rounds}")
    print("extra: peak of resident memory above that before the call, each run in a fresh process\n")
    print(f"{'pairs':>7}  {'form':<12}{'wall':>9}{'CPU':>9}{'extra':>10}   against dense: wall, CPU, extra")
    figures["table"] = {size: _one_size(size, args.width, args.rounds, threads) for size in sizes}
    if args.rank_of:
        figures["rank"] = _rank(args.rank_pairs, args.width, args.rank_of, threads)
    figures["opposed"] = _opposed(args.width)
    write_figures(args.json, figures)


def _one_size(num_pairs: int, width: int, rounds: int, threads: int) -> dict[str, dict[str, float]]:
    """Measures all forms at one size and prints a line for each."""
    forms = (*(("dense", "dense_twice") if num_pairs <= LARGEST_DENSE else ()), *CHUNKED)
    runs: dict[str, list[Measured]] = {form: [] for form in forms}
    for _ in range(rounds):
        for form in forms:
            runs[form].append(in_fresh_process(form, num_pairs, width, 1, threads))
    medians = {form: _median(of_form) for form, of_form in runs.items()}
    for form, median in medians.items():
        line = f"{num_pairs:>7}  {form:<12}{_times(median)}{median.extra_bytes / 1e6:>7.0f} MB"
        if form != "dense" and "dense" in medians:
            base = medians["dense"]
            line += f"   {median.wall_s / base.wall_s:.2f}, {median.cpu_s / base.cpu_s:.2f}, "
            line += f"1/{base.extra_bytes / max(1, median.extra_bytes):.1f}"
        print(line, flush=True)
    return {form: median._asdict() for form, median in medians.items()}


def _rank(num_pairs: int, width: int, num_ranks: int, threads: int) -> dict[str, float]:
    """Measures and prints one rank's part of a batch."""
    run = in_fresh_process("rank", num_pairs, width, num_ranks, threads)
    print(
        f"\none rank of {num_ranks}, {num_pairs} pairs: {run.wall_s:.1f} s wall, {run.cpu_s:.1f} s CPU, "
        f"{run.extra_bytes / 1e6:.0f} MB with the embeddings of all ranks, whole process {run.peak_bytes / 1e6:.0f} MB"
    )
    return run._asdict()


def _opposed(width: int) -> dict[str, float]:
    """Measures and prints errors where a fixed shift of the exponent underflows."""
    errors = opposed_pairs(2048, width)
    print(
        "\nscale 100, clips and captions around opposite directions, 2048 pairs: "
        f"loss {errors['loss']:.4f}; relative error of the gradient against float64: "
        f"chunked {errors['chunked']:.1e}, dense {errors['dense']:.1e}; "
        f"loss with a fixed shift of the exponent: {errors['fixed_shift']:g}"
    )
    return errors


def _times(m: Measured) -> str:
    """Wall and processor time as two columns."""
    return f"{m.wall_s:>7.2f} s{m.cpu_s:>7.2f} s"


def _median(runs: list[Measured]) -> Measured:
    """The median of each figure by itself."""
    columns = [statistics.median(column) for column in zip(*runs, strict=True)]
    return Measured(columns[0], columns[1], int(columns[2]), int(columns[3]), columns[4])


def in_fresh_process(form: str, num_pairs: int, width: int, num_ranks: int, threads: int) -> Measured:
    """Measures in a process that nothing has run in, so that no memory is left over from before.

    Raises:
        ConfigError: It does not fit into memory.
    """
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        try:
            return pool.apply(measure, (form, num_pairs, width, num_ranks, threads))
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise ConfigError(
                f"{form} of {num_pairs} pairs of width {width} does not fit into this machine's memory: lower --sizes, "
                "--rank-pairs or --width"
            ) from error
