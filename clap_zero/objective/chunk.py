"""How large a block of the similarity matrix is; no torch, so that whoever estimates memory can ask."""

from __future__ import annotations

CHUNK_ON_CPU, CHUNK_ELSEWHERE = 1024, 4096
"""Edge of a block. On a CPU a block of 4 MiB stays in the cache; elsewhere fewer, larger kernels."""


def default_chunk(device_type: str) -> int:
    """Edge of a block where nobody says another.

    Args:
        device_type: "cpu", "cuda" and so on.
    """
    return CHUNK_ON_CPU if device_type == "cpu" else CHUNK_ELSEWHERE
