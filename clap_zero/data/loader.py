"""Batches for a rank: worker processes around the pipeline, one endless stream for training, one pass for evaluation.

Workers come from a forkserver: they import neither the caller's main module nor anything heavy. Worker w of W builds
batches w, w + W, w + 2 W... and they are taken in turn, so the stream does not depend on W. One set of workers lasts
for all epochs. It ends when the generator is closed or collected, and by itself when the rank dies.
"""

from __future__ import annotations

import atexit
import os
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch.utils.data import DataLoader
from webdataset import DataPipeline

from clap_zero.data.batch import Batch, EvalBatch, LoaderPlan
from clap_zero.data.blacklist import Blacklist
from clap_zero.data.index import ShardIndex
from clap_zero.data.pipeline import Failure, build_pipeline
from clap_zero.data.processes import forkserver_context, init_worker, starting_workers
from clap_zero.data.schedule import num_eval_batches
from clap_zero.data.skips import SkipWatch
from clap_zero.data.text import MAX_TOKENS
from clap_zero.data.worker_ends import WatchedWorkers
from clap_zero.errors import ConfigError, DataError

__all__ = ["Batch", "EvalBatch", "LoaderPlan", "eval_batches", "train_batches"]

MOST_WAITED_S = 2.0
"""What one look counts for at the most: while the whole job was suspended, nobody has waited."""

LOOK_S = 1.0
"""How often is looked whether a worker that gives no batch still lives."""


def train_batches(index: ShardIndex, *, plan: LoaderPlan) -> Iterator[Batch]:
    """The rank's micro batches from `plan.position` on, without end: step after step, epoch after epoch.

    Close the generator to end its workers.

    Args:
        index: the shards.
        plan: what this rank reads.

    Returns:
        A generator; all ranks get batches of equal size and may take as many as they like.

    Raises:
        DataError: (from this call) there are fewer samples than a global batch; (from the generator) too many samples
            are bad, or a worker died.
        ConfigError: a setting is out of range.
    """
    _check(plan)
    if index.num_samples < plan.global_batch:
        raise DataError(
            f"a global batch of {plan.global_batch} ({plan.micro_batch} micro x {plan.accumulation} accumulation x "
            f"{plan.world_size} ranks) is more than the {index.num_samples} samples in {index.num_shards} shards: "
            f"lower the micro batch or the accumulation, or give more data"
        )
    pipeline = build_pipeline(index, plan, training=True, blacklist=Blacklist.read(plan.blacklist))
    return cast("Iterator[Batch]", _batches(pipeline, index, plan, workers=plan.workers, training=True))


def eval_batches(index: ShardIndex, *, plan: LoaderPlan) -> Iterator[EvalBatch]:
    """One pass over all clips in their natural order, shared over the ranks, the same on each call.

    Args:
        index: the shards.
        plan: what this rank reads; `micro_batch` is the largest size of a batch.

    Returns:
        A generator of ceil(num_samples / (world_size * micro_batch)) batches on every rank.

    Raises:
        DataError: too many samples are bad, or a worker died.
        ConfigError: a setting is out of range.
    """
    _check(plan)
    # A batch that is not full repeats clips, which are read and embedded in vain: none is larger than a rank's share.
    plan = replace(plan, micro_batch=min(plan.micro_batch, -(-index.num_stored // plan.world_size)))
    workers = min(plan.workers, num_eval_batches(plan, index.num_stored))
    # Not without the blacklist's clips: they are on it because they are evaluated on.
    pipeline = build_pipeline(index, plan, training=False)
    return cast("Iterator[EvalBatch]", _batches(pipeline, index, plan, workers=workers, training=False))


def _check(plan: LoaderPlan) -> None:
    if not 2 < plan.max_caption_tokens <= MAX_TOKENS:
        raise ConfigError(
            f"data.max_caption_tokens must be from 3 to {MAX_TOKENS} (<s> and </s> included), is "
            f"{plan.max_caption_tokens}"
        )
    if min(plan.micro_batch, plan.accumulation, plan.world_size, plan.shuffle_shards, plan.prefetch) < 1:
        raise ConfigError(f"micro batch, accumulation, ranks, shuffle_shards and prefetch must be at least 1: {plan}")
    if plan.workers < 0:
        raise ConfigError(f"data.workers must be 0 or more, is {plan.workers}")


def _batches(
    pipeline: DataPipeline, index: ShardIndex, plan: LoaderPlan, *, workers: int, training: bool
) -> Iterator[Batch | EvalBatch]:
    """Takes batches from the pipeline, in this process or from workers, and watches over them."""
    watched = WatchedWorkers()
    source: Iterator[Any] = iter(pipeline) if workers == 0 else _start_workers(pipeline, plan, workers)
    watched.watch(getattr(source, "_workers", ()))
    if training:
        watch = SkipWatch(plan, index.num_samples, largest_shard=int(index.sizes.max()))
    else:  # each clip once, shard after shard: only all of them together say how many are unusable
        watch = SkipWatch(plan, index.num_stored, largest_shard=index.num_stored)
    # A generator that is still open when the program ends: before multiprocessing waits for workers to take SIGTERM.
    leave = partial(_stop, source)
    atexit.register(leave)
    try:
        while True:
            try:
                batch = _next(source, watched, stall_timeout_s=plan.stall_timeout_s)
            except StopIteration:
                return
            except Exception as error:
                # Whatever ends a worker is the end of the data.
                why = _one_line(error) if isinstance(error, DataError) else watched.ends() or _one_line(error)
                raise DataError(f"the data loader of rank {plan.rank} failed: {why}") from error
            if isinstance(batch, Failure):
                raise DataError(f"rank {plan.rank}: {batch.message}")
            watch.see(batch)
            yield batch
    finally:
        atexit.unregister(leave)
        leave()


def _stop(source: object) -> None:
    """Ends the workers now. They would end when the last reference goes, but an error's traceback holds one."""
    for name in ("_shutdown_workers", "close"):  # torch's iterator, a generator
        if hasattr(source, name):
            getattr(source, name)()
    # torch gives a worker that is stuck in a read 5 s, then sends SIGTERM, which workers do not take.
    for worker in getattr(source, "_workers", ()):
        worker.kill()


def _next(source: Iterator[Any], watched: WatchedWorkers, *, stall_timeout_s: float | None) -> Any:
    """The next batch, as soon as a worker has it.

    Raises:
        DataError: none came for `stall_timeout_s`.
    """
    waited_s, before = 0.0, time.monotonic()
    while True:
        try:
            return next(source)
        except RuntimeError as error:
            # torch gives up after LOOK_S without a batch, and keeps everything so that it can be asked again.
            if "DataLoader timed out" not in str(error):
                raise
        now = time.monotonic()
        waited_s, before = waited_s + min(now - before, MOST_WAITED_S), now
        if stall_timeout_s is not None and waited_s > stall_timeout_s:
            raise DataError(watched.end_stalled(since_s=waited_s))


def _one_line(error: Exception) -> str:
    """First line of an error and, where it is a worker's traceback, the last, which names the error itself."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}"


def _start_workers(pipeline: object, plan: LoaderPlan, workers: int) -> Iterator[object]:
    # Where the package is installed, workers inherit the imports of the server instead of repeating them.
    context = forkserver_context("clap_zero.data.pipeline")
    with warnings.catch_warnings(), starting_workers():
        # torch compares the workers of this rank with the cores of the machine; their number is the run config's.
        warnings.filterwarnings("ignore", message="This DataLoader will create", category=UserWarning)
        loader: DataLoader = DataLoader(
            pipeline,  # type: ignore[arg-type]
            batch_size=None,
            num_workers=workers,
            multiprocessing_context=context,
            worker_init_fn=partial(init_worker, os.getpid()),
            prefetch_factor=plan.prefetch,
            pin_memory=plan.pin_memory and torch.cuda.is_available(),
            timeout=LOOK_S,
        )
        return iter(loader)
