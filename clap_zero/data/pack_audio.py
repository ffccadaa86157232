"""Audio files to FLAC, 48 kHz, mono, 16 bit, in many processes with the order kept."""

from __future__ import annotations

import io
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import soundfile

from clap_zero.audio.decode import AudioError, load_clip
from clap_zero.data.pack_sources import Item
from clap_zero.data.processes import forkserver_context, init_worker, starting_workers
from clap_zero.data.shards import MAX_MEMBER_BYTES
from clap_zero.errors import DataError

SAMPLE_RATE_HZ = 48_000
_AHEAD = 4


@dataclass(frozen=True)
class Encoded:
    """What became of an item.

    Attributes:
        item: the item, without its bytes.
        flac: bytes of the FLAC file, None where it was rejected.
        num_samples: its length at 48 kHz.
        reason: why it was rejected.
        cut: it was longer than the limit and lost its end.
        silent: all its samples are zero.
        note: what is damaged in a file whose readable part is kept.
    """

    item: Item
    flac: bytes | None = None
    num_samples: int = 0
    reason: str | None = None
    cut: bool = False
    silent: bool = False
    note: str | None = None


def encode(item: Item, *, max_seconds: float, drop_silent: bool) -> Encoded:
    """Decodes one item and writes it as FLAC.

    Args:
        item: what to pack.
        max_seconds: longest part that is kept, from the start, in seconds.
        drop_silent: reject clips whose samples are all zero.
    """
    bare = item.without_bytes()
    if item.reason is not None:
        return Encoded(bare, reason=item.reason)
    try:
        data = item.audio if item.audio is not None else _read(item.path)
        # A little more than is kept tells whether there was more.
        notes: list[str] = []
        samples = load_clip(data, max_seconds=max_seconds + 0.01, sample_rate_hz=SAMPLE_RATE_HZ, notes=notes)
    except AudioError as error:
        return Encoded(bare, reason=str(error))
    limit = round(max_seconds * SAMPLE_RATE_HZ)
    kept = samples[:limit]
    # The inverse of how 16-bit files are decoded, so that these come through unchanged.
    pcm = np.clip(np.rint(kept * 32768.0), -32768, 32767).astype(np.int16)
    silent = not pcm.any()
    if silent and drop_silent:
        return Encoded(bare, reason="silent", silent=True)
    buffer = io.BytesIO()
    soundfile.write(buffer, pcm, SAMPLE_RATE_HZ, format="FLAC", subtype="PCM_16")
    cut, note = samples.size > limit, "; ".join(notes) or None
    return Encoded(bare, buffer.getvalue(), kept.size, cut=cut, silent=silent, note=note)


def _read(path: str) -> bytes:
    try:
        if Path(path).stat().st_size > MAX_MEMBER_BYTES:
            raise AudioError(f"the file is larger than {MAX_MEMBER_BYTES} bytes")
        return Path(path).read_bytes()
    except FileNotFoundError as error:
        raise AudioError("the file is missing") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise AudioError(f"the file cannot be read: {getattr(error, 'strerror', None) or error}") from error


def encode_all(items: Iterable[Item], *, workers: int, max_seconds: float, drop_silent: bool) -> Iterator[Encoded]:
    """Encodes items in their order; the result does not depend on `workers`.

    Args:
        items: read lazily, a few for each worker ahead.
        workers: processes; 0 or 1 works in this one.
        max_seconds: see `encode`.
        drop_silent: see `encode`.

    Raises:
        DataError: a worker died.
    """
    work = partial(encode, max_seconds=max_seconds, drop_silent=drop_silent)
    if workers <= 1:
        yield from map(work, items)
        return
    pool = ProcessPoolExecutor(
        workers, mp_context=forkserver_context(__name__), initializer=init_worker, initargs=(os.getpid(),)
    )
    pending: deque[Future[Encoded]] = deque()
    latest = "the first"
    try:
        for item in items:
            with starting_workers():
                pending.append(pool.submit(work, item))
            if len(pending) >= _AHEAD * workers:
                result = pending.popleft().result()
                latest = result.item.name
                yield result
        while pending:
            result = pending.popleft().result()
            latest = result.item.name
            yield result
    except BrokenProcessPool as error:
        raise DataError(
            f"a packing process died soon after {latest} (killed, or out of memory): use fewer --workers"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
