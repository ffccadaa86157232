"""Makes one set of shards of all parts: one numbering, one index.

Tars are moved, not copied, after a plan that is on the disk before the first one moves. Each step can be done again, so
a join that was killed is finished by the same command, on any machine. Nothing is removed before all splits are in
their places.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from clap_zero.data.pack_parts import (
    JOIN_DIRECTORY,
    PARTS_DIRECTORY,
    PLAN_FILE,
    PartRecord,
    numbers_missing,
    parts_there,
    shown_numbers,
)
from clap_zero.data.pack_report import REJECTED_FILE, PackReport
from clap_zero.data.pack_scratch import (
    disk_errors_told,
    leftovers,
    remove_leftovers,
    scratch_directory,
    sync_directory,
)
from clap_zero.data.pack_writer import SplitNumbers, index_split, write_json
from clap_zero.data.sizes import SIZES_FILE
from clap_zero.data.spans import SPAN_TYPE, SPANS_FILE
from clap_zero.errors import DataError

_LOCK_FILE = ".lock"
_MADE, _READY, _OLD = "made", "ready", "old"
"""Directories of the join, each with a name a split: what is put together, marks that it is whole (from then on it only
moves to its place), and what it replaces. A split may have any name, so none is made of another by a suffix."""
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EINVAL)


def join(out: Path, *, overwrite: bool = False) -> PackReport:
    """Joins the parts that `pack` made under `out`; afterwards the parts are gone.

    The pairs are those of one pack of the same source, under the same keys and in the same order; the last tar of each
    part may be smaller than the others.

    Args:
        out: where the parts were packed to.
        overwrite: replace splits that are there.

    Raises:
        DataError: parts are missing, double, damaged, or were made of different options or sources; a split is there
            already; another join is at work; or the disk refuses.
    """
    parts = out / PARTS_DIRECTORY
    with disk_errors_told(out, "nothing is lost: the same command goes on"):
        if not parts.is_dir():
            splits = sorted(path.parent.name for path in out.glob("*/" + SIZES_FILE))
            done = f"; the splits {splits} are there: joined already?" if splits else ""
            raise DataError(f"{out} has no parts: pack them with --part i/n first{done}")
        with _locked(parts):
            remove_leftovers(parts)
            return _join(out, parts / JOIN_DIRECTORY, overwrite)


@contextlib.contextmanager
def _locked(parts: Path) -> Iterator[None]:
    """Keeps out a second join. Without locks of the file system both do the same, and one of them fails in the end."""
    with (parts / _LOCK_FILE).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(f"the parts in {parts.parent} are being joined by another process") from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        yield


def _join(out: Path, work: Path, overwrite: bool) -> PackReport:
    if not (work / PLAN_FILE).is_file():
        records = _read_parts(out)
        report = PackReport()
        for record in records:
            report.add_part(record.report)
        if not any(numbers.num_pairs for record in records for numbers in record.splits.values()):
            raise DataError(report.nothing_packed())
        plan = _plan(records, report)
        _refuse_existing(out, work, plan, overwrite)
        shutil.rmtree(work, ignore_errors=True)  # without a plan nothing was moved into it
        for directory in (_MADE, _READY, _OLD):
            (work / directory).mkdir(parents=True)
        write_json(work / PLAN_FILE, plan)
        sync_directory(work)
    plan = json.loads((work / PLAN_FILE).read_text("utf-8"))
    _refuse_existing(out, work, plan, overwrite)
    for name in plan["splits"]:
        if not (work / _READY / name).exists():
            _build(out, work, name, plan)
    for name in plan["splits"]:
        _publish(out, work, name)
    report = PackReport()
    report.add_part({**plan["report"], "damaged": plan["report"]["damaged"]})
    for name, split in plan["splits"].items():
        report.splits[name] = SplitNumbers.from_json(split["numbers"]).report(out / name)
    _check_published(out, plan)
    _remove_parts(out, work)
    others = leftovers(out / PARTS_DIRECTORY)
    if others:
        report.notes.append(
            f"{others[0]} is of a pack on another machine that runs still or was killed: remove it if none runs"
        )
    return report


def _read_parts(out: Path) -> list[PartRecord]:
    """All parts in their order.

    Raises:
        DataError: they are no whole.
    """
    there = parts_there(out)
    counts = sorted({part.count for part, _ in there})
    if not there:
        raise DataError(f"{out / PARTS_DIRECTORY} has no parts: pack them with --part i/n first")
    if len(counts) > 1:
        kinds = "; ".join(
            f"{shown_numbers([part.number for part, _ in there if part.count == count])} of {count}" for count in counts
        )
        raise DataError(
            f"{out / PARTS_DIRECTORY} has parts of {len(counts)} divisions ({kinds}): remove those of all but one"
        )
    missing = numbers_missing(there, counts[0])
    if missing:
        raise DataError(f"{out}: {len(missing)} of {counts[0]} parts are missing: {shown_numbers(missing)}")
    records: list[PartRecord] = []
    for part, path in there:
        record = PartRecord.read(path)
        if record.part != part or (records and records[-1].part == part):
            raise DataError(f"{path} holds part {record.part}, which is there twice or under a wrong name: remove one")
        differences = record.differences(records[0].options, records[0].source) if records else []
        if differences:
            raise DataError(
                f"part {record.part} differs from part {records[0].part} in {'; '.join(differences)}: pack the "
                "wrong one again with --overwrite"
            )
        records.append(record)
    return records


def _plan(records: list[PartRecord], report: PackReport) -> dict[str, Any]:
    """Where each tar comes from and goes to, and all numbers. Splits without a pair lend the first their rejected."""
    names = list(dict.fromkeys(name for record in records for name in record.splits))
    splits: dict[str, dict[str, Any]] = {}
    homeless: list[str] = []
    for name in names:
        numbers, sources = SplitNumbers(), []
        for record in records:
            own = record.splits.get(name, SplitNumbers())
            for tar, num_pairs, size_bytes in own.shards:
                sources.append(f"{_directory_name(record)}/{name}/{tar}")
                numbers.shards.append((f"{len(numbers.shards)}.tar", num_pairs, size_bytes))
            numbers.num_rejected += own.num_rejected
            numbers.num_samples += own.num_samples
        rejected = [f"{_directory_name(record)}/{name}" for record in records if name in record.splits]
        if numbers.num_pairs:
            splits[name] = {"numbers": numbers, "sources": sources, "rejected": rejected, "parts": rejected}
        else:
            homeless += rejected
    first = next(iter(splits.values()))
    first["rejected"] = first["rejected"] + homeless
    first["numbers"].num_rejected += sum(
        numbers.num_rejected for record in records for name, numbers in record.splits.items() if name not in splits
    )
    options = records[0].options
    return {
        "encoding": {name: options[name] for name in ("store", "truncation")},
        "report": report.numbers(),
        "splits": {name: {**split, "numbers": split["numbers"].to_json()} for name, split in splits.items()},
    }


def _directory_name(record: PartRecord) -> str:
    return f"{record.part.number}-of-{record.part.count}"


def _refuse_existing(out: Path, work: Path, plan: dict[str, Any], overwrite: bool) -> None:
    for name in plan["splits"]:
        target = out / name
        published = (work / _READY / name).exists() and not (work / _MADE / name).exists()
        if not published and not overwrite and target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise DataError(f"{target} is there already: give --overwrite; the parts stay as they are")


def _build(out: Path, work: Path, name: str, plan: dict[str, Any]) -> None:
    """Moves the tars of a split together and writes its indexes. What was done before is left as it is."""
    split, parts = plan["splits"][name], out / PARTS_DIRECTORY
    made = work / _MADE / name
    made.mkdir(exist_ok=True)
    for unfinished in made.glob(".*"):
        unfinished.unlink()
    numbers = SplitNumbers.from_json(split["numbers"])
    for source, (tar, _, size_bytes) in zip(split["sources"], numbers.shards, strict=True):
        with contextlib.suppress(FileNotFoundError):  # moved before the join was killed, or by a join beside this one
            (parts / source).rename(made / tar)
        if not (made / tar).is_file() or (made / tar).stat().st_size != size_bytes:
            raise DataError(f"{made / tar}, which was {parts / source}, is not there as it was packed")
    with (made / REJECTED_FILE).open("w", encoding="utf-8") as file:
        for source in split["rejected"]:
            file.write((parts / source / REJECTED_FILE).read_text("utf-8"))
    spans = [np.load(parts / source / SPANS_FILE, allow_pickle=False) for source in split["parts"]]
    index_split(made, numbers, np.concatenate([np.zeros(0, SPAN_TYPE), *spans]), plan["encoding"])
    sync_directory(made)
    (work / _READY / name).touch()
    sync_directory(work / _READY)


def _publish(out: Path, work: Path, name: str) -> None:
    made, target = work / _MADE / name, out / name
    if not made.exists():
        return  # before the join was killed
    if target.exists():
        old = work / _OLD / name
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
    made.rename(target)
    sync_directory(out)


def _check_published(out: Path, plan: dict[str, Any]) -> None:
    """The last look before the parts go.

    Raises:
        DataError: a split is not where it belongs.
    """
    for name in plan["splits"]:
        if not (out / name / SIZES_FILE).is_file():
            raise DataError(f"{out / name} is not there after the join of its parts, which stay in {PARTS_DIRECTORY}")


def _remove_parts(out: Path, work: Path) -> None:
    """Removes what was joined, the plan last; what packs on other machines are working in stays."""
    parts = out / PARTS_DIRECTORY
    for _, path in parts_there(out):
        shutil.rmtree(path)
    with scratch_directory(parts) as scratch:
        work.rename(scratch / "joined")
    (parts / _LOCK_FILE).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # something is left in it
        parts.rmdir()
