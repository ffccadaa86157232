"""Facts as a table for a terminal. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with columns as wide as their widest entry, under a header."""
    lines = [tuple(header), *(tuple(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    padded = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return [f"  {line}" for line in padded]


def ranges(numbers: Sequence[int]) -> str:
    """Such as 0-7,16 for sorted numbers."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def told_rate(bytes_hz: float) -> str:
    """Such as 950 MB/s or 1.2 GB/s."""
    if bytes_hz >= 1e9:
        return f"{bytes_hz / 1e9:.1f} GB/s"
    return f"{bytes_hz / 1e6:.0f} MB/s" if bytes_hz >= 10e6 else f"{bytes_hz / 1e6:.2f} MB/s"
