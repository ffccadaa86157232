"""Resident memory: what is taken shows, and the peak counts anew."""

from __future__ import annotations

from clap_zero.process_memory import forget_peak, peak_bytes, resident_bytes

SIZE = 64_000_000


def test_a_peak_is_remembered_until_it_is_forgotten() -> None:
    forget_peak()
    before = resident_bytes()
    block = bytearray(SIZE)
    block[::4096] = b"\1" * len(block[::4096])
    assert resident_bytes() > before + 0.9 * SIZE
    del block
    assert resident_bytes() < before + 0.5 * SIZE < peak_bytes()
    forget_peak()
    assert peak_bytes() < before + 0.5 * SIZE
