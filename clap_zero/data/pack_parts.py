"""Parts of a pack: each is made by itself, on any machine, in a directory of its own under `OUT/.parts`.

`3-of-64/` there holds the splits of part 3 with their tars, and `part.json`: the options and the source that it was
made of, which all parts must share, and its numbers. It appears complete.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clap_zero.data.pack_keys import Part
from clap_zero.data.pack_report import PackReport
from clap_zero.data.pack_writer import SplitNumbers, write_json
from clap_zero.errors import DataError

PARTS_DIRECTORY, JOIN_DIRECTORY = ".parts", "join"
RECORD_FILE, PLAN_FILE = "part.json", "plan.json"
_VERSION = 1
_PART_NAME = re.compile(r"(\d+)-of-(\d+)")
_SHOWN = 20


def part_directory(out: Path, part: Part) -> Path:
    """Where a part lies."""
    return out / PARTS_DIRECTORY / f"{part.number}-of-{part.count}"


@dataclass(frozen=True)
class PartRecord:
    """What a part was made of, and what it holds.

    Attributes:
        part: which one.
        options: what decides about the result, by name.
        source: fingerprint of the source as a whole.
        splits: the tars of each split.
        report: numbers for the report of the join.
    """

    part: Part
    options: dict[str, Any]
    source: str
    splits: dict[str, SplitNumbers]
    report: dict[str, Any]

    def write(self, directory: Path) -> None:
        """Writes part.json."""
        value = {
            "version": _VERSION,
            "part": self.part.number,
            "num_parts": self.part.count,
            "options": self.options,
            "source": self.source,
            "splits": {name: numbers.to_json() for name, numbers in self.splits.items()},
            "report": self.report,
        }
        write_json(directory / RECORD_FILE, value)

    @classmethod
    def read(cls, directory: Path) -> PartRecord:
        """Reads part.json, and checks that the tars that it names are there.

        Raises:
            DataError: the part is not whole.
        """
        path = directory / RECORD_FILE
        try:
            value = json.loads(path.read_text("utf-8"))
            if value["version"] != _VERSION:
                raise DataError(f"{path} is of version {value['version']}, this clap_zero joins {_VERSION}: pack again")
            splits = {name: SplitNumbers.from_json(numbers) for name, numbers in value["splits"].items()}
            part = Part(value["part"], value["num_parts"])
            record = cls(part, value["options"], value["source"], splits, value["report"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path} cannot be read ({error}): pack this part again with --overwrite") from error
        for split, numbers in splits.items():
            for name, _, size_bytes in numbers.shards:
                tar = directory / split / name
                there = tar.stat().st_size if tar.is_file() else 0
                if there != size_bytes:
                    raise DataError(
                        f"{tar} has {there} of {size_bytes} bytes: copy it again, or pack part {part} with --overwrite"
                    )
        return record

    def differences(self, options: dict[str, Any], source: str) -> list[str]:
        """In what this part differs from a pack of these options and this source, in words."""
        found = [
            f"{name} {self.options.get(name)!r} and {options.get(name)!r}"
            for name in dict.fromkeys([*self.options, *options])
            if self.options.get(name) != options.get(name)
        ]
        return found or (["the source: its table, or the names of its files"] if self.source != source else [])


def find_part(out: Path, part: Part, *, options: dict[str, Any], source: str) -> PackReport | None:
    """The report of a part that is there already; None where it is not.

    Raises:
        DataError: it is there, and was made of other options or of another source.
    """
    directory = part_directory(out, part)
    if not directory.exists():
        return None
    record = PartRecord.read(directory)
    differences = record.differences(options, source)
    if differences:
        raise DataError(
            f"{directory} is there already, and differs in {'; '.join(differences)}: give --overwrite, or another --out"
        )
    report = PackReport(part=str(part))
    report.add_part(record.report)
    report.splits = {name: numbers.report(directory / name) for name, numbers in record.splits.items()}
    report.notes.append(f"part {part} was there already: nothing was done (--overwrite packs it again)")
    report.notes.append(missing_parts(out, part.count))
    return report


def parts_there(out: Path) -> list[tuple[Part, Path]]:
    """The parts that lie in `out`, in the order of their numbers."""
    directory = out / PARTS_DIRECTORY
    found = []
    for path in directory.iterdir() if directory.is_dir() else ():
        match = _PART_NAME.fullmatch(path.name)
        if match is not None:
            found.append((Part(int(match[1]), int(match[2])), path))
    return sorted(found, key=lambda entry: (entry[0].count, entry[0].number, entry[1].name))


def numbers_missing(there: list[tuple[Part, Path]], count: int) -> list[int]:
    """Numbers of the parts that are not there."""
    numbers = {part.number for part, _ in there if part.count == count}
    return [number for number in range(1, count + 1) if number not in numbers]


def shown_numbers(numbers: list[int]) -> str:
    """The first of them, for messages."""
    return ", ".join(map(str, numbers[:_SHOWN])) + (", ..." if len(numbers) > _SHOWN else "")


def missing_parts(out: Path, count: int) -> str:
    """What is to be done next, for the report of a part."""
    missing = numbers_missing(parts_there(out), count)
    if missing:
        return f"{len(missing)} of {count} parts are still to be packed: {shown_numbers(missing)}"
    return f"all {count} parts are there: clap-zero pack --join --out {out}"


def refuse_begun_join(out: Path) -> None:
    """Keeps parts as they are once their join has begun.

    Raises:
        DataError: it has.
    """
    plan = out / PARTS_DIRECTORY / JOIN_DIRECTORY / PLAN_FILE
    if plan.exists():
        raise DataError(
            f"the join of the parts in {out} has begun: finish it with clap-zero pack --join --out {out}, or give "
            f"another --out"
        )
