"""The sums of `clap-zero check`, and whether training would end over what was found."""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self, TextIO

from clap_zero.data.skips import count_kind, reason_kind
from clap_zero.errors import ConfigError, DataError, one_line

_FATAL_KEPT = 5


@dataclass
class CheckReport:
    """The sums of a check.

    Attributes:
        num_shards: shards of the index.
        num_samples: samples of the count of record.
        max_bad: most unusable samples that training passes over in an epoch.
        num_good: samples that training can use.
        num_bad: samples that it has to skip.
        num_blacklisted: samples that the blacklist names; training leaves them out, and they count against nothing.
        num_names: names in the blacklist; None without one.
        num_names_met: how many of them name a sample of these shards.
        num_unpaired: keys behind the count that lack audio or caption.
        num_notes: what is wrong and loses nothing, such as a file of which the readable part is used.
        num_truncated: captions that are cut.
        duration_s: seconds of sound decoded.
        logmels: how many usable samples are log-mels that were stored for which kind of model.
        reasons: how many samples were bad for which kind of reason.
        fatal: the first few that end training by themselves: sources that cannot be read, samples that kill a process.
        num_fatal: how many of those.
        index_lines: which index files were written, or why not.
        elapsed_s: seconds that the check took.
    """

    num_shards: int = 0
    num_samples: int = 0
    max_bad: float = 0.0
    num_good: int = 0
    num_bad: int = 0
    num_blacklisted: int = 0
    num_names: int | None = None
    num_names_met: int = 0
    num_unpaired: int = 0
    num_notes: int = 0
    num_truncated: int = 0
    duration_s: float = 0.0
    logmels: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    fatal: list[str] = field(default_factory=list)
    num_fatal: int = 0
    index_lines: list[str] = field(default_factory=list)
    elapsed_s: float = 0.0

    def count_bad(self, reason: str, number: int = 1) -> None:
        """Counts samples that cannot be used."""
        self.num_bad += number
        count_kind(self.reasons, reason_kind(reason), number)

    def count_rarer_kind(self) -> None:
        """Counts log-mels as unusable that were stored for another kind of model than most: no model takes both."""
        for kind, number in self.logmels.most_common()[1:]:
            self.num_good -= number
            self.count_bad(
                f"stored log-mel was made for another model (most are for the other kind than {kind})", number
            )
            del self.logmels[kind]

    def count_fatal(self, what: str) -> None:
        """Notes what ends training by itself."""
        self.num_fatal += 1
        if len(self.fatal) < _FATAL_KEPT:
            self.fatal.append(one_line(what))

    @property
    def stop_reason(self) -> str | None:
        """Why training on these shards would end early; None where it would not.

        The rule is that of training when all ranks have read a whole epoch.
        """
        if self.fatal:
            if self.num_fatal == 1:
                return self.fatal[0]
            return f"{self.num_fatal} faults end it by themselves, the first: {self.fatal[0]}"
        if self.num_good == 0:
            return f"0 usable of {self.num_samples} samples{self._commonest()}"
        if self.num_bad > self.max_bad:
            return (
                f"{self.num_bad} of {self.num_samples} samples are unusable, data.max_bad_fraction lets "
                f"{int(self.max_bad)} pass{self._commonest()}"
            )
        return None

    def raise_if_stopped(self) -> None:
        """Raises where training would stop.

        Raises:
            DataError: it would.
        """
        if self.stop_reason is not None:
            raise DataError(f"training on these shards would stop: {self.stop_reason}")

    def lines(self) -> list[str]:
        """The sums, for people."""
        share = 100 * self.num_bad / max(1, self.num_samples)
        lines = [
            f"checked {self.num_samples:,} samples in {self.num_shards:,} shards in {self.elapsed_s:.1f} s: "
            f"{self.num_good:,} usable ({self.duration_s / 3600:.2f} h), {self.num_bad:,} unusable ({share:.2f} %)"
        ]
        lines += [f"{number:10,}  {reason}" for reason, number in self.reasons.most_common()]
        others = {
            "samples that the blacklist names": self.num_blacklisted,
            "keys without audio or caption, not counted as samples": self.num_unpaired,
            "notes on what loses nothing": self.num_notes,
            "captions that are cut to data.max_caption_tokens": self.num_truncated,
        }
        lines += [f"{number:10,}  {what}" for what, number in others.items() if number]
        lines += [f"{number:10,}  log-mels, stored for {kind} models alone" for kind, number in self.logmels.items()]
        if self.num_names is not None:
            lines.append(
                f"the blacklist has {self.num_names:,} names and leaves out {self.num_blacklisted:,} of these samples; "
                f"{self.num_names - self.num_names_met:,} of its names are names of none"
            )
        lines += self.index_lines
        if self.stop_reason is None:
            lines.append(
                f"training would go on: up to {int(self.max_bad):,} unusable samples of an epoch are passed over"
            )
        return lines

    def _commonest(self) -> str:
        if not self.reasons:
            return ""
        common = "; ".join(f"{reason} ({number})" for reason, number in self.reasons.most_common(3))
        return f"; the commonest reasons: {common}"


class FindingsFile:
    """Writes the findings of a check as one JSON document while they come: {"findings": [...], "sums": {...}}.

    The file appears when it is complete; what was there before stays until then. Use it as a context: without
    `finish` nothing is left behind.

    Args:
        path: the file, or a device or pipe that is written to directly; None writes nothing.

    Raises:
        ConfigError: it cannot be written; from `add` and `finish`, too.
    """

    def __init__(self, path: Path | None) -> None:
        self._path, self._separator = path, "\n"
        self._file: TextIO | None = None
        self._partial: Path | None = None
        if path is None:
            return
        if not path.exists() or path.is_file():
            self._partial = path.with_name(f".{path.name}.{os.getpid()}")
        with self._named_errors():
            self._file = (self._partial or path).open("w", encoding="utf-8")
        self._write('{"findings": [')

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # what is buffered still
                self._file.close()
        if self._partial is not None:
            self._partial.unlink(missing_ok=True)

    def add(self, finding: Mapping[str, str]) -> None:
        """Writes one finding."""
        # ASCII only: a key can hold bytes that are no UTF-8.
        self._write(self._separator + json.dumps(finding, ensure_ascii=True))
        self._separator = ",\n"

    def finish(self, report: CheckReport) -> None:
        """Writes the sums, ends the document and puts the file in its place."""
        sums = {**vars(report), "stop_reason": report.stop_reason}
        self._write(f'\n],\n"sums": {json.dumps(sums, ensure_ascii=True)}}}\n')
        if self._file is None or self._path is None:
            return
        with self._named_errors():
            self._file.close()
            if self._partial is not None:
                self._partial.replace(self._path)

    def _write(self, text: str) -> None:
        if self._file is not None:
            with self._named_errors():
                self._file.write(text)

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError(f"--json {self._path} cannot be written: {error.strerror or error}") from error
