"""Random numbers as a function of where the run is.

Nothing has to be saved for a resumed run to draw what an uninterrupted one draws: before each micro batch the
generators are set from (seed, step, micro batch, rank).
"""

from __future__ import annotations

import hashlib

import torch


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from any parts, the same on every machine and in every process."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_micro_batch(*, seed: int, step: int, micro_index: int, rank: int) -> None:
    """Set torch's generators (CPU and the current device) for dropout and drop-path of one micro batch."""
    torch.manual_seed(derive_seed("micro", seed, step, micro_index, rank))
