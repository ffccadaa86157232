"""Reads shards as training would, before training does, and says what it would meet.

Every sample goes through the stages of the loader: bytes, decoding, captions, tokens. What cannot be used is printed
with shard, key and reason, and summed by reason; then the rule of the loader says whether training would end over it.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from tqdm import tqdm

from clap_zero.audio.clips import FeatureConfig
from clap_zero.data.batch import LoaderPlan
from clap_zero.data.blacklist import Blacklist
from clap_zero.data.captions import CaptionRule
from clap_zero.data.check_index import IndexFiles
from clap_zero.data.check_pool import read_all
from clap_zero.data.check_report import CheckReport, FindingsFile
from clap_zero.data.check_worker import Bad, Blacklisted, Done, Good, Message, Note, Opened, Task, Unpaired
from clap_zero.data.index import ShardIndex, load_index
from clap_zero.data.places import ReadPolicy
from clap_zero.data.skips import bad_limit
from clap_zero.errors import DataError, one_line


@dataclass(frozen=True)
class CheckOptions:
    """What to check, and how training would read it.

    Attributes:
        shards: split directories, tars or brace patterns.
        workers: processes.
        rule: how captions are made.
        truncation: kind of model; a stored log-mel has to fit it. None: the kind that it was made for.
        max_seconds: longest part of a clip that is decoded, in seconds.
        max_caption_tokens: longest caption, special tokens included.
        max_bad_fraction: part of an epoch that may be unusable.
        blacklist: files with keys that are left out.
        policy: how remote shards are read.
        json_path: file for all findings and the sums.
        write_index: write sizes.json, index.json and spans.npy where they are missing.
        rewrite_index: write them where they are, too.
        index_out: where the indexes of remote directories go, to be copied there.
        progress: show a bar on a terminal.
    """

    shards: tuple[str, ...]
    workers: int = 1
    rule: CaptionRule = field(default_factory=CaptionRule)
    truncation: Literal["fusion", "rand_trunc"] | None = None
    max_seconds: float = 60.0
    max_caption_tokens: int = 77
    max_bad_fraction: float = 0.05
    blacklist: tuple[str, ...] = ()
    policy: ReadPolicy = field(default_factory=ReadPolicy)
    json_path: Path | None = None
    write_index: bool = True
    rewrite_index: bool = False
    index_out: Path | None = None
    progress: bool = True

    def plan(self) -> LoaderPlan:
        """The loader's plan of one rank that reads everything."""
        return LoaderPlan(
            rank=0,
            world_size=1,
            micro_batch=1,
            features=FeatureConfig(self.truncation or "fusion"),
            max_caption_tokens=self.max_caption_tokens,
            max_seconds=self.max_seconds,
            max_bad_fraction=self.max_bad_fraction,
            policy=self.policy,
            blacklist=self.blacklist,
        )


def check(options: CheckOptions) -> CheckReport:
    """Reads all samples in processes, prints every finding, writes indexes that are missing.

    Args:
        options: what to check.

    Returns:
        The sums.

    Raises:
        DataError: no shard can be found, or all hold nothing.
        ConfigError: a file cannot be written, or a setting is out of range.
        LaunchError: the processes do not start.
    """
    begun_s = time.monotonic()
    plan, blacklist = options.plan(), Blacklist.read(options.blacklist)
    report = CheckReport(num_names=len(blacklist) if options.blacklist else None)
    index = _find(options, report)
    report.num_shards = index.num_shards
    files = IndexFiles(index, write=options.write_index, rewrite=options.rewrite_index, out=options.index_out)
    with FindingsFile(options.json_path) as findings:
        show = options.progress and sys.stderr.isatty()
        with tqdm(total=index.num_stored, unit="samples", disable=not show, smoothing=0.05) as bar:
            tally = _Tally(report, findings, files, bar)
            tasks = _tasks(index, options)
            messages = read_all(tasks, plan=plan, blacklist=blacklist, workers=options.workers)
            with contextlib.closing(messages):  # its processes end with this, whatever ends it
                for task, message in messages:
                    tally.take(task, message)
        report.count_rarer_kind()
        num = report.num_samples = report.num_good + report.num_bad + report.num_blacklisted
        report.max_bad = bad_limit(num, num_samples=num, max_bad_fraction=options.max_bad_fraction)
        report.index_lines = files.close()
        report.elapsed_s = time.monotonic() - begun_s
        findings.finish(report)
    return report


def _find(options: CheckOptions, report: CheckReport) -> ShardIndex:
    """The index; without the shards over which training would not start, which are a finding here."""

    def load(policy: ReadPolicy) -> ShardIndex:
        return load_index(options.shards, policy=policy, caption_key=options.rule.caption_key, max_counted=None)

    with _each_once("clap_zero.data.count", "clap_zero.data.find"):
        try:
            return load(options.policy)
        except DataError as error:
            if options.policy.missing == "skip":
                raise
            try:
                index = load(replace(options.policy, missing="skip"))
            except DataError:
                raise error from None
            report.count_fatal(str(error))
            return index


@contextlib.contextmanager
def _each_once(*names: str) -> Iterator[None]:
    """Has loggers say each thing once: the shards may be looked for twice."""
    said: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        return not (text in said or said.add(text))  # type: ignore[func-returns-value]

    loggers = [logging.getLogger(name) for name in names]
    for logger in loggers:
        logger.addFilter(is_new)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_new)


def _tasks(index: ShardIndex, options: CheckOptions) -> Iterator[Task]:
    for number in range(index.num_shards):
        yield Task(
            number,
            index.shard(number),
            options.rule,
            recount=options.rewrite_index,
            any_kind=options.truncation is None,
        )


class _Tally:
    """Takes what the processes say: prints, counts, and hands on what the indexes need."""

    def __init__(self, report: CheckReport, findings: FindingsFile, files: IndexFiles, bar: tqdm) -> None:
        self._report, self._findings, self._files, self._bar = report, findings, files, bar
        self._names_met: set[int] = set()

    def take(self, task: Task, message: Message) -> None:
        """Counts one message about a shard."""
        report = self._report
        if isinstance(message, Opened):
            self._files.add(task.number, message)
        elif isinstance(message, Good):
            report.num_good += 1
            report.num_truncated += message.num_truncated
            report.duration_s += message.duration_s
            if message.logmel is not None:
                report.logmels[message.logmel] += 1
            self._files.add_duration(task.number, message.duration_s)
            self._bar.update()
        elif isinstance(message, Bad):
            report.count_bad(message.reason)
            if message.fatal:
                report.count_fatal(f"{message.key}: {message.reason}")
            self._say("fatal" if message.fatal else "unusable", message.key, message.reason)
            self._bar.update()
        elif isinstance(message, Blacklisted):
            report.num_blacklisted += 1
            self._names_met |= message.names
            report.num_names_met = len(self._names_met)
            self._bar.update()
        elif isinstance(message, Unpaired):
            report.num_unpaired += 1
            self._say("unpaired", message.key, message.reason)
        elif isinstance(message, Note):
            report.num_notes += 1
            where, _, what = message.text.partition(": ")
            self._say("note", where if what else "", what or where)
        elif isinstance(message, Done) and message.fault is not None:
            report.count_bad(message.fault, message.num_left)
            report.count_fatal(f"{task.shard.key_prefix}: {message.fault}")
            self._say("fatal", task.shard.key_prefix, f"{message.fault} ({message.num_left} samples)")
            self._bar.update(message.num_left)

    def _say(self, kind: str, where: str, what: str) -> None:
        self._findings.add({"kind": kind, "where": where, "what": what})
        prefix = f"{where}: " if where else ""
        self._bar.write(one_line(f"{kind}: {prefix}{what}"), file=sys.stdout)
