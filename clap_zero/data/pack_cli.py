"""Command line of `clap-zero pack`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from clap_zero.data.pack import PackOptions, PackReport, pack
from clap_zero.data.pack_join import join
from clap_zero.data.pack_keys import Part
from clap_zero.data.pack_sources import Columns
from clap_zero.errors import ConfigError


def add_pack_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `clap-zero pack`."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--manifest", type=Path, metavar="FILE", help="CSV, TSV or JSONL table, a row for each clip")
    source.add_argument("--folder", type=Path, metavar="DIR", help="folder of audio with a .txt or .json beside each")
    source.add_argument("--dataset", metavar="NAME_OR_DIR", help="Hugging Face dataset: a name or a local directory")
    source.add_argument("--join", action="store_true", help="make one set of shards of the parts that lie in --out")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="gets a directory of shards per split")
    columns = parser.add_argument_group("columns")
    columns.add_argument("--audio-column", metavar="NAME", help="column of the audio file (default: the usual names)")
    columns.add_argument(
        "--caption-column",
        action="append",
        default=[],
        metavar="NAME",
        help="column of a caption or a list of captions; may be repeated (default: caption, caption_2, text, ...)",
    )
    columns.add_argument(
        "--caption-template",
        action="append",
        default=[],
        metavar="TEXT",
        help="caption made from columns, such as 'This is a sound of {category}.'; may be repeated",
    )
    columns.add_argument("--split-column", metavar="NAME", help="column that holds the split of a row")
    columns.add_argument(
        "--split-map",
        action="append",
        default=[],
        metavar="VALUE=SPLIT",
        help="renames a value of the split column, '*' is every other, such as 5=test and '*=train'; may be repeated",
    )
    columns.add_argument("--split", default="train", help="split where no column says it (default: %(default)s)")
    columns.add_argument(
        "--caption-key", default="text", metavar="KEY", help="key of the captions in a folder's .json (%(default)s)"
    )
    parser.add_argument("--audio-root", type=Path, metavar="DIR", help="start of a manifest's relative paths")
    parser.add_argument("--dataset-config", metavar="NAME", help="configuration of the dataset")
    parser.add_argument(
        "--store",
        choices=("flac", "logmel"),
        default="flac",
        help="what is stored: FLAC, or the log-mel, for training without decoding (%(default)s)",
    )
    parser.add_argument(
        "--truncation", choices=("fusion", "rand_trunc"), help="the kind of model that --store logmel is made for"
    )
    parser.add_argument("--part", metavar="I/N", help="pack part I of N by itself, on any machine; then --join")
    parser.add_argument("--shard-size", type=int, default=512, metavar="PAIRS", help="pairs in a tar (%(default)s)")
    parser.add_argument("--workers", type=int, metavar="N", help="processes (default: the cores of this machine)")
    parser.add_argument(
        "--max-seconds",
        type=float,
        default=PackOptions.max_seconds,
        metavar="S",
        help="longest part of a clip that is kept, from its start, in seconds (%(default)s)",
    )
    parser.add_argument("--drop-silent", action="store_true", help="reject clips whose samples are all zero")
    parser.add_argument("--overwrite", action="store_true", help="replace splits that are there already")
    parser.add_argument("--no-progress", action="store_true", help="no progress bar")


def options_from_args(args: argparse.Namespace) -> PackOptions:
    """The options that the arguments stand for.

    Raises:
        ConfigError: a --split-map is not VALUE=SPLIT.
    """
    split_map = {}
    for entry in args.split_map:
        value, equals, split = entry.rpartition("=")
        if not equals or not split:
            raise ConfigError(f"--split-map {entry!r}: write VALUE=SPLIT, for example 5=test")
        split_map[value] = split
    return PackOptions(
        out=args.out,
        manifest=args.manifest,
        folder=args.folder,
        dataset=args.dataset,
        dataset_config=args.dataset_config,
        columns=Columns(
            audio=args.audio_column,
            captions=tuple(args.caption_column),
            templates=tuple(args.caption_template),
            split=args.split_column,
            split_map=split_map,
            default_split=args.split,
        ),
        audio_root=args.audio_root,
        caption_key=args.caption_key,
        store=args.store,
        truncation=args.truncation,
        part=None if args.part is None else Part.parse(args.part),
        shard_size=args.shard_size,
        workers=len(os.sched_getaffinity(0)) if args.workers is None else args.workers,
        max_seconds=args.max_seconds,
        drop_silent=args.drop_silent,
        overwrite=args.overwrite,
        progress=not args.no_progress,
    )


def pack_from_args(args: argparse.Namespace) -> PackReport:
    """Packs or joins, and prints the report.

    Raises:
        ClapZeroError: see `clap_zero.data.pack.pack` and `clap_zero.data.pack_join.join`.
    """
    report = join(args.out, overwrite=args.overwrite) if args.join else pack(options_from_args(args))
    print("\n".join(report.lines()), flush=True)
    return report
