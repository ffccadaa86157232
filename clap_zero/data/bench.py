"""How fast the loader reads a data set on this machine, which stage is the limit, and what to do about it."""

from __future__ import annotations

import contextlib
import io
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

import numpy as np
import psutil
import soundfile
import torch

from clap_zero.audio.features import ClapFeatures, FeatureConfig
from clap_zero.data.batch import Batch, LoaderPlan
from clap_zero.data.bench_report import FEATURES, BenchReport
from clap_zero.data.index import ShardIndex, load_index
from clap_zero.data.loader import train_batches
from clap_zero.data.members import BadSampleError
from clap_zero.data.places import ReadPolicy
from clap_zero.data.shards import ShardReader
from clap_zero.data.skips import reason_kind

_MICRO_BATCH = 32
_YARDSTICK_CLIPS = 64
_YARDSTICK_BYTES = 64_000_000


@dataclass(frozen=True)
class BenchOptions:
    """What is measured.

    Attributes:
        shards: split directories, tars or brace patterns, as data.train takes them.
        seconds: how long batches are taken, after a start that does not count.
        workers: loader processes; 0 reads in this process.
        micro_batch: pairs of a batch; None: 32, or all samples where there are fewer.
        truncation: kind of model, "rand_trunc" or "fusion".
        seed: of the order, crops and captions.
        features: compute the log-mels of each batch, too, on the GPU where there is one.
        caption_key: key of the captions in a sample's json.
        max_seconds: longest part of a clip that is decoded, in seconds.
        shuffle_shards: shards whose samples are mixed.
        policy: how remote shards are read.
    """

    shards: tuple[str, ...]
    seconds: float = 10.0
    workers: int = 0
    micro_batch: int | None = None
    truncation: Literal["rand_trunc", "fusion"] = "rand_trunc"
    seed: int = 0
    features: bool = False
    caption_key: str = "text"
    max_seconds: float = 60.0
    shuffle_shards: int = 16
    policy: ReadPolicy = field(default_factory=ReadPolicy)


def bench_loader(options: BenchOptions) -> BenchReport:
    """Reads as training does for some seconds and measures it, with bare decoding before and after as the yardstick.

    Raises:
        DataError: the data cannot be read, or too many samples are unusable.
        ConfigError: a setting is out of range.
    """
    index = load_index(options.shards, policy=options.policy, caption_key=options.caption_key)
    micro_batch = options.micro_batch or min(_MICRO_BATCH, index.num_samples)
    plan = LoaderPlan(
        rank=0,
        world_size=1,
        micro_batch=micro_batch,
        features=FeatureConfig(truncation=options.truncation),
        seed=options.seed,
        shuffle_shards=options.shuffle_shards,
        workers=options.workers,
        max_seconds=options.max_seconds,
        policy=options.policy,
    )
    batches = train_batches(index, plan=plan)  # checks the plan before anything takes time
    clips = _encoded_clips(index, plan)
    bare = [_bare_decoding(clips, options.seconds / 8)]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu") if options.features else None
    try:
        with _one_thread():
            measured = _measure(
                batches,
                warm_up=1 + plan.workers * plan.prefetch,  # the workers prepare so many while they start
                seconds=options.seconds,
                features=None if device is None else _feature_stage(plan.features, device),
            )
    finally:
        batches.close()  # type: ignore[attr-defined]
    bare.append(_bare_decoding(clips, options.seconds / 8))
    decoded = sum(count for count, _, _ in bare)
    return BenchReport(
        num_shards=index.num_shards,
        num_samples=index.num_samples,
        workers=options.workers,
        micro_batch=micro_batch,
        truncation=options.truncation,
        device=None if device is None else device.type,
        **measured,
        bare_pairs_per_core_s=decoded / sum(cpu_s for _, cpu_s, _ in bare) if decoded else None,
        mean_clip_s=sum(clip_s for _, _, clip_s in bare) / decoded if decoded else None,
    )


def _feature_stage(features: FeatureConfig, device: torch.device) -> Callable[[Batch], None]:
    """Computes the log-mels of a batch on the device and waits for them."""
    compute = ClapFeatures(features, device=device)

    def stage(batch: Batch) -> None:
        compute(batch.to(device).clips)
        if device.type == "cuda":
            torch.cuda.synchronize()

    return stage


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Arithmetic of this process on one thread, so that a figure per core means a core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _measure(
    batches: Iterator[Batch], *, warm_up: int, seconds: float, features: Callable[[Batch], None] | None
) -> dict[str, Any]:
    """Takes batches for `seconds`, at least two, after `warm_up` of them; gives fields of a BenchReport."""
    for batch in islice(batches, warm_up):
        if features is not None:
            features(batch)
    stage_s: defaultdict[str, float] = defaultdict(float)
    skipped: Counter[str] = Counter()
    num_pairs = num_batches = 0
    started, cpu_before = time.perf_counter(), _cpu_seconds()
    while num_batches < 2 or time.perf_counter() - started < seconds:
        batch = next(batches)
        if features is not None:
            begun = time.perf_counter()
            features(batch)
            stage_s[FEATURES] += time.perf_counter() - begun
        num_pairs += len(batch)
        num_batches += 1
        for stage, spent in batch.seconds.items():
            stage_s[stage] += spent
        skipped.update(reason_kind(reason) for _, reason in batch.skipped)
    return {
        "num_pairs": num_pairs,
        "wall_s": time.perf_counter() - started,
        "cpu_s": _cpu_seconds() - cpu_before,
        "stage_s": dict(stage_s),
        "skipped": dict(skipped),
    }


def _cpu_seconds() -> float:
    """CPU time of this process and of all that descend from it, in seconds."""
    total = time.process_time()
    for process in psutil.Process(os.getpid()).children(recursive=True):
        try:
            times = process.cpu_times()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # it ended between the list and the look
        total += times.user + times.system
    return total


def _encoded_clips(index: ShardIndex, plan: LoaderPlan) -> list[bytes]:
    """Audio files of samples that lie evenly over the data, as bytes."""
    reader = ShardReader(plan.policy)
    found: list[bytes] = []
    ends = np.cumsum(index.sizes)
    places = np.unique(np.linspace(0, int(ends[-1]) - 1, _YARDSTICK_CLIPS).astype(np.int64))
    for place in places.tolist():
        number = int(np.searchsorted(ends, place, side="right"))
        try:
            first = int(ends[number] - index.sizes[number])
            found.append(reader.read(index.shard(number), place - first).audio)
        except BadSampleError:
            continue  # the loader counts it
        if sum(map(len, found)) > _YARDSTICK_BYTES:
            break
    reader.close()
    return found


def _bare_decoding(clips: list[bytes], seconds: float) -> tuple[int, float, float]:
    """Decodes whole clips in turn with soundfile for about `seconds`, each at least once.

    Returns:
        Clips decoded, CPU seconds that it took, and seconds of sound in them.
    """
    count, cpu_s, clip_s = 0, 0.0, 0.0
    usable = list(clips)
    while usable and (count == 0 or cpu_s < seconds):
        for data in list(usable):
            before = time.process_time()
            try:
                samples, rate_hz = soundfile.read(io.BytesIO(data), dtype="float32")
            except soundfile.LibsndfileError:
                usable.remove(data)
                continue
            cpu_s += time.process_time() - before
            clip_s += len(samples) / rate_hz
            count += 1
            if cpu_s >= seconds and count >= len(usable):
                break
    return count, cpu_s, clip_s
