"""Packs audio files with captions into shards. What cannot be packed is counted, printed and written beside them."""

from __future__ import annotations

import os
import shutil
import socket
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from clap_zero.data.pack_audio import SAMPLE_RATE_HZ, Encoded, encode_all
from clap_zero.data.pack_datasets import from_dataset
from clap_zero.data.pack_sources import SPLIT_NAME, Columns, Source, from_folder, from_manifest
from clap_zero.data.pack_writer import REJECTED_FILE, SplitWriter
from clap_zero.errors import ConfigError, DataError


@dataclass(frozen=True)
class PackOptions:
    """What to pack and how. Exactly one of `manifest`, `folder` and `dataset` is given.

    Attributes:
        out: directory that gets a directory for each split.
        manifest: CSV, TSV or JSONL table.
        folder: folder of audio files with .json or .txt of the same name beside them.
        dataset: name or directory of a Hugging Face dataset.
        dataset_config: configuration of the dataset.
        columns: which columns hold what.
        audio_root: where relative paths of a manifest start; None: at the manifest.
        caption_key: key of the captions in a folder's .json files.
        shard_size: pairs in a tar.
        workers: processes.
        max_seconds: longest part of a clip that is kept, from its start, in seconds.
        drop_silent: reject clips whose samples are all zero.
        overwrite: replace splits that are there.
        progress: show a progress bar when on a terminal.
    """

    out: Path
    manifest: Path | None = None
    folder: Path | None = None
    dataset: str | None = None
    dataset_config: str | None = None
    columns: Columns = field(default_factory=Columns)
    audio_root: Path | None = None
    caption_key: str = "text"
    shard_size: int = 512
    workers: int = 1
    max_seconds: float = 600.0
    drop_silent: bool = False
    overwrite: bool = False
    progress: bool = True


@dataclass(frozen=True)
class SplitReport:
    """What a split became: its directory, pairs, tars, rejected items, and the duration of its audio in seconds."""

    directory: Path
    num_pairs: int
    num_shards: int
    num_rejected: int
    duration_s: float


@dataclass
class PackReport:
    """What was packed and what was not.

    Attributes:
        splits: by name.
        num_rows: rows of the source.
        num_duplicates: rows that repeat an earlier one.
        reasons: how often each reason for a rejection occurred.
        extra: files beside the source that nothing names.
        num_cut: clips that were longer than the limit.
        num_silent: clips whose samples are all zero.
        damaged: name and fault of each file of which only the readable part was kept.
    """

    splits: dict[str, SplitReport] = field(default_factory=dict)
    num_rows: int = 0
    num_duplicates: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    extra: list[str] = field(default_factory=list)
    num_cut: int = 0
    num_silent: int = 0
    damaged: list[str] = field(default_factory=list)

    @property
    def num_pairs(self) -> int:
        """Pairs packed."""
        return sum(split.num_pairs for split in self.splits.values())

    @property
    def num_rejected(self) -> int:
        """Items that were not packed."""
        return sum(self.reasons.values())

    def lines(self) -> list[str]:
        """The report for people, a line each."""
        lines = [
            f"{name}: {split.num_pairs} pairs, {split.duration_s:.0f} s, in {split.num_shards} shards in "
            f"{split.directory}"
            + (f"; {split.num_rejected} rejected, see {REJECTED_FILE}" if split.num_rejected else "")
            for name, split in self.splits.items()
        ]
        lines.append(
            f"{self.num_rows} rows: {self.num_pairs} packed, {self.num_rejected} rejected, "
            f"{self.num_duplicates} said twice"
        )
        lines += [f"rejected {count}: {reason}" for reason, count in self.reasons.most_common(20)]
        if self.extra:
            lines.append(f"{len(self.extra)} files beside them are not listed: {', '.join(self.extra[:5])}")
        if self.num_cut:
            lines.append(f"{self.num_cut} clips were longer than --max-seconds and lost their end")
        if self.damaged:
            shown = "; ".join(self.damaged[:5]) + ("; ..." if len(self.damaged) > 5 else "")
            lines.append(f"{len(self.damaged)} damaged files were kept as far as they can be read: {shown}")
        if self.num_silent:
            lines.append(f"{self.num_silent} clips are silent (all samples zero); --drop-silent leaves them out")
        return lines


def pack(options: PackOptions) -> PackReport:
    """Packs a source into shards. Each split appears whole under `options.out`, or stays as it was.

    A pack that is killed while it publishes several splits may leave some new and some old.

    Args:
        options: what and how.

    Raises:
        ConfigError: options contradict each other.
        DataError: a split is there already, the source cannot be read, or nothing could be packed.
    """
    source = _source(options)
    scratch = options.out / f".packing-{socket.gethostname()}-{os.getpid()}"
    _remove_leftovers(options.out)
    _refuse_existing(options, [options.columns.default_split] if options.folder else [])
    options.out.mkdir(parents=True, exist_ok=True)
    scratch.mkdir()
    report = PackReport(num_rows=source.num_rows, num_duplicates=source.num_duplicates, extra=source.extra)
    writers: dict[str, SplitWriter] = {}
    try:
        encoded = encode_all(
            source.items, workers=options.workers, max_seconds=options.max_seconds, drop_silent=options.drop_silent
        )
        bar = tqdm(encoded, total=source.num_items, unit="clip", disable=None if options.progress else True)
        _write(bar, options, report, writers, scratch)
        _publish(options, report, writers)
    finally:
        for writer in writers.values():
            writer.abandon()
        _move_back(scratch)
        shutil.rmtree(scratch, ignore_errors=True)
    return report


def _source(options: PackOptions) -> Source:
    given = [name for name in ("manifest", "folder", "dataset") if getattr(options, name) is not None]
    if len(given) != 1:
        raise ConfigError(f"give one of a manifest, a folder and a dataset to pack; given: {given or 'none'}")
    if options.shard_size < 1 or options.workers < 0 or options.max_seconds <= 0:
        raise ConfigError("shard size must be at least 1, workers 0 or more, and the limit of seconds above 0")
    if not SPLIT_NAME.fullmatch(options.columns.default_split):
        raise ConfigError(f"{options.columns.default_split!r} cannot be the name of a split")
    if options.manifest is not None:
        return from_manifest(options.manifest, options.columns, options.audio_root)
    if options.folder is not None:
        if not options.folder.is_dir():
            raise DataError(f"{options.folder} is not a folder")
        return from_folder(options.folder, options.columns.default_split, options.caption_key)
    assert options.dataset is not None
    return from_dataset(options.dataset, options.columns, config=options.dataset_config)


def _write(
    encoded: Iterable[Encoded],
    options: PackOptions,
    report: PackReport,
    writers: dict[str, SplitWriter],
    scratch: Path,
) -> None:
    for result in encoded:
        split = result.item.split
        if split not in writers:
            _refuse_existing(options, [split])
            (scratch / split).mkdir()
            writers[split] = SplitWriter(scratch / split, options.shard_size)
        report.num_cut += result.cut
        report.num_silent += result.silent
        if result.note is not None:
            report.damaged.append(f"{result.item.name} ({result.note})")
        if result.flac is not None:
            writers[split].add(result)
        else:
            reason = result.reason or "unknown"
            writers[split].reject(result.item.name, reason)
            # "row 7: no caption" and "row 9: no caption" are one kind.
            report.reasons[reason.split(": ", 1)[1] if reason.startswith("row ") and ": " in reason else reason] += 1


def _publish(options: PackOptions, report: PackReport, writers: dict[str, SplitWriter]) -> None:
    """Closes the splits and moves them into their places."""
    full = {name: writer for name, writer in writers.items() if writer.num_pairs}
    if not full:
        reasons = "; ".join(f"{reason} ({count})" for reason, count in report.reasons.most_common(5))
        raise DataError(f"0 usable of {report.num_rows} samples, nothing was packed: {reasons}")
    # A split of rejected items only is not made; where they went is written beside the first that is.
    for writer in writers.values():
        if not writer.num_pairs:
            next(iter(full.values())).take_rejected(writer)
    for name, writer in full.items():
        writer.close()
        target = options.out / name
        if target.exists():
            old = writer.directory.with_name(f"{name}.old")
            target.rename(old)
        writer.directory.rename(target)
        report.splits[name] = SplitReport(
            target, writer.num_pairs, writer.num_shards, writer.num_rejected, writer.num_samples / SAMPLE_RATE_HZ
        )


def _refuse_existing(options: PackOptions, splits: Iterable[str]) -> None:
    for split in splits:
        target = options.out / split
        if target.exists() and not options.overwrite and (not target.is_dir() or any(target.iterdir())):
            raise DataError(f"{target} is there already: give --overwrite, or another directory")


def _move_back(scratch: Path) -> None:
    """Puts splits back that were moved out of the way, and whose successors never came into their places."""
    for old in scratch.glob("*.old"):
        target = scratch.parent / old.name.removesuffix(".old")
        if not target.exists():
            old.rename(target)


def _remove_leftovers(out: Path) -> None:
    """Removes what packs of this machine left when they were killed, once the splits that they took are back."""
    host = f".packing-{socket.gethostname()}-"
    for path in out.glob(".packing-*"):
        pid = path.name.removeprefix(host)
        if path.name.startswith(host) and pid.isdigit() and not Path(f"/proc/{pid}").exists():
            _move_back(path)
            shutil.rmtree(path, ignore_errors=True)
