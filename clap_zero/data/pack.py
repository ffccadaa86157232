"""Packs audio files with captions into shards. What cannot be packed is counted, printed and written beside them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from clap_zero.data.pack_datasets import from_dataset
from clap_zero.data.pack_encoding import Encoded, Encoding, Store, Truncation
from clap_zero.data.pack_items import Item, Source
from clap_zero.data.pack_keys import Listing, Part, list_share
from clap_zero.data.pack_parts import (
    PARTS_DIRECTORY,
    PartRecord,
    find_part,
    missing_parts,
    part_directory,
    refuse_begun_join,
)
from clap_zero.data.pack_pool import encode_all, warm_up
from clap_zero.data.pack_report import PackReport, SplitReport
from clap_zero.data.pack_scratch import disk_errors_told, made_in, scratch_directory, take_place
from clap_zero.data.pack_sidecars import from_folder
from clap_zero.data.pack_sources import SPLIT_NAME, Columns, from_manifest
from clap_zero.data.pack_writer import SplitWriter, encoding_json
from clap_zero.errors import ConfigError, DataError

__all__ = ["PackOptions", "PackReport", "SplitReport", "pack"]


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
        store: "flac", or "logmel" for training without decoding.
        truncation: the kind of model that a log-mel is made for.
        part: pack this part of the items only; `pack_join.join` makes one of all parts.
        shard_size: pairs in a tar.
        workers: processes.
        max_seconds: longest part of a clip that is kept, from its start, in seconds.
        drop_silent: reject clips whose samples are all zero.
        overwrite: replace splits (or the part) that are there.
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
    store: Store = "flac"
    truncation: Truncation | None = None
    part: Part | None = None
    shard_size: int = 512
    workers: int = 1
    max_seconds: float = 600.0
    drop_silent: bool = False
    overwrite: bool = False
    progress: bool = True

    @property
    def encoding(self) -> Encoding:
        """How clips are stored."""
        return Encoding(self.max_seconds, self.drop_silent, self.truncation)

    def deciding(self) -> dict[str, Any]:
        """What all parts of a pack must have in common, as JSON. Places may differ from machine to machine."""
        return {
            **encoding_json(self.encoding),
            "max_seconds": self.max_seconds,
            "drop_silent": self.drop_silent,
            "shard_size": self.shard_size,
            "kind": next(name for name in ("manifest", "folder", "dataset") if getattr(self, name) is not None),
            "dataset_config": self.dataset_config,
            "caption_key": self.caption_key,
            "columns": {
                name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self.columns).items()
            },
        }


def pack(options: PackOptions) -> PackReport:
    """Packs a source into shards. Each split appears whole under `options.out`, or stays as it was.

    A pack that is killed while it publishes several splits may leave some new and some old. A part appears whole in a
    directory of its own; one that is there already, of the same source and options, is left as it is.

    Args:
        options: what and how.

    Raises:
        ConfigError: options contradict each other.
        DataError: a split is there already, the source cannot be read, the disk is full, or nothing could be packed.
    """
    _check(options)
    part = options.part or Part(1, 1)
    place = options.out if options.part is None else options.out / PARTS_DIRECTORY
    with disk_errors_told(options.out, "nothing that was there is lost"):
        if options.part is not None:
            refuse_begun_join(options.out)
        if options.workers > 1:
            warm_up()
        source = _source(options)
        listing = list_share(source.names(), part.share(source.num_items, options.shard_size))
        if options.part is not None and not options.overwrite:
            found = find_part(
                options.out, options.part, options=options.deciding(), source=listing.fingerprint + source.content
            )
            if found is not None:
                return found
        elif options.folder is not None:
            _refuse_existing(options, [options.columns.default_split])
        with scratch_directory(place) as scratch:
            return _Pack(options, source, listing, scratch).run()


def _check(options: PackOptions) -> None:
    given = [name for name in ("manifest", "folder", "dataset") if getattr(options, name) is not None]
    if len(given) != 1:
        raise ConfigError(f"give one of a manifest, a folder and a dataset to pack; given: {given or 'none'}")
    if options.shard_size < 1 or options.workers < 0 or not 0 < options.max_seconds < 1e6:
        raise ConfigError("shard size must be at least 1, workers 0 or more, and the limit of seconds above 0")
    if not SPLIT_NAME.fullmatch(options.columns.default_split):
        raise ConfigError(f"{options.columns.default_split!r} cannot be the name of a split")
    if options.store == "logmel" and options.truncation is None:
        raise ConfigError(
            "--store logmel: say for which kind of model with --truncation: fusion or rand_trunc; their filters differ"
        )
    if options.store == "flac" and options.truncation is not None:
        raise ConfigError(f"--truncation {options.truncation}: FLAC serves both kinds of model; add --store logmel")


def _source(options: PackOptions) -> Source:
    if options.manifest is not None:
        return from_manifest(options.manifest, options.columns, options.audio_root)
    if options.folder is not None:
        if not options.folder.is_dir():
            raise DataError(f"{options.folder} is not a folder")
        return from_folder(options.folder, options.columns.default_split, options.caption_key)
    assert options.dataset is not None
    return from_dataset(options.dataset, options.columns, config=options.dataset_config)


class _Pack:
    """One pack, or one part of one, that works in `scratch`."""

    def __init__(self, options: PackOptions, source: Source, listing: Listing, scratch: Path) -> None:
        self._options = options
        self._source = source
        self._listing = listing
        self._scratch = scratch
        # A part's directory is published as a whole, splits with its record.
        self._made = made_in(scratch) if options.part is None else made_in(scratch) / "part"
        self._writers: dict[str, SplitWriter] = {}
        self._report = PackReport(
            num_rows=source.num_rows,
            num_items=source.num_items,
            num_duplicates=source.num_duplicates,
            num_listed=len(listing.share),
            extra=source.find_extra() if options.part is None or options.part.number == 1 else [],
            part=None if options.part is None else str(options.part),
        )

    def run(self) -> PackReport:
        """Packs and publishes."""
        options = self._options
        self._made.mkdir(exist_ok=True)
        encoded = encode_all(self._items(), options.encoding, workers=options.workers)
        bar = tqdm(encoded, total=len(self._listing.share), unit="clip", disable=None if options.progress else True)
        try:
            self._write(bar)
            if options.part is None:
                self._publish_splits()
            else:
                self._publish_part(options.part)
        finally:
            for writer in self._writers.values():
                writer.abandon()
        return self._report

    def _items(self) -> Iterator[Item]:
        for item, key in zip(self._source.read(self._listing.share), self._listing.keys, strict=True):
            yield replace(item, key=key)

    def _write(self, encoded: Iterable[Encoded]) -> None:
        report = self._report
        for result in encoded:
            split = result.item.split
            if split not in self._writers:
                if self._options.part is None:
                    _refuse_existing(self._options, [split])
                (self._made / split).mkdir()
                self._writers[split] = SplitWriter(self._made / split, self._options.shard_size, self._options.encoding)
            report.num_cut += result.cut
            report.num_silent += result.silent
            if result.note is not None and result.data is not None:
                report.damaged.append(f"{result.item.name} ({result.note})")
            if result.data is not None:
                self._writers[split].add(result)
            else:
                reason = result.reason or "unknown"
                self._writers[split].reject(result.item.name, reason)
                report.count_reason(reason)

    def _publish_splits(self) -> None:
        """Closes the splits and moves them into their places."""
        report = self._report
        for writer in self._writers.values():
            writer.finish()
        full = {name: writer for name, writer in self._writers.items() if writer.numbers.num_pairs}
        if not full:
            raise DataError(report.nothing_packed())
        # A split of rejected items only is not made; where they went is written beside the first that is.
        for writer in self._writers.values():
            if not writer.numbers.num_pairs:
                next(iter(full.values())).take_rejected(writer)
        for writer in full.values():  # each of them, before the first moves: a full disk then changes nothing
            writer.close()
        for name, writer in full.items():
            target = self._options.out / name
            take_place(writer.directory, target, self._scratch)
            report.splits[name] = writer.numbers.report(target)

    def _publish_part(self, part: Part) -> None:
        target = part_directory(self._options.out, part)
        for name, writer in self._writers.items():
            writer.finish()
            writer.close()
            self._report.splits[name] = writer.numbers.report(target / name)
        record = PartRecord(
            part,
            options=self._options.deciding(),
            source=self._listing.fingerprint + self._source.content,
            splits={name: writer.numbers for name, writer in self._writers.items()},
            report=self._report.numbers(),
        )
        record.write(self._made)
        refuse_begun_join(self._options.out)
        take_place(self._made, target, self._scratch)
        self._report.notes.append(missing_parts(self._options.out, part.count))


def _refuse_existing(options: PackOptions, splits: Iterable[str]) -> None:
    for split in splits:
        target = options.out / split
        if target.exists() and not options.overwrite and (not target.is_dir() or any(target.iterdir())):
            raise DataError(f"{target} is there already: give --overwrite, or another directory")
