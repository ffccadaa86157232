"""Weights that the tests of ranks start from; made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed import zero_cases as zc


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Warmed-up weights, with and without fusion."""
    root = tmp_path_factory.mktemp("warm")
    return {fused: zc.warmed_up(root / f"fused-{fused}", fused=fused) for fused in (False, True)}


@pytest.fixture(scope="session")
def with_heads(weights: dict[bool, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Weights with LAION's extra heads, with and without fusion; made when they are asked for."""
    root = tmp_path_factory.mktemp("heads")

    class Made(dict[bool, Path]):
        def __missing__(self, fused: bool) -> Path:
            self[fused] = zc.with_heads(weights[fused], root / f"fused-{fused}", fused=fused)
            return self[fused]

    return Made()
