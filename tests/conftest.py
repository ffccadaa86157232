"""Shared by all tests: nothing leaves the machine, one thread per process, long and GPU tests are asked for."""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis
import pytest

os.environ.update(
    {
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "WANDB_MODE": "disabled",
    }
)
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(name, None)

# No deadline: a loaded machine is not a failure. The same examples in every run.
hypothesis.settings.register_profile("suite", deadline=None, derandomize=True)
hypothesis.settings.load_profile("suite")

ROOT = Path(__file__).resolve().parents[1]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="also run the matrices that take minutes each")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip, with the reason, what was not asked for or cannot run here."""
    skips = []
    if not config.getoption("--long"):
        skips.append(("long", pytest.mark.skip(reason="long matrix: pytest --long, or launch/test.sh --all")))
    if any("gpu" in item.keywords for item in items):
        import torch

        if not torch.cuda.is_available():
            skips.append(("gpu", pytest.mark.skip(reason="no CUDA device here")))
    for item in items:
        for marker, skip in skips:
            if item.get_closest_marker(marker):
                item.add_marker(skip)


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT
