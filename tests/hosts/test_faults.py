"""When something dies or never worked, everything on every host ends, soon, with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hosts.bed import Bed
from tests.hosts.fault_cases import FAULTS
from tests.hosts.faults import Fault, Scene, is_right, play

pytestmark = pytest.mark.integration
SHORT = ("--distributed.heartbeat_timeout_s", "10")
"""The shipped limits are measured by benchmarks/faults.py."""


@pytest.mark.parametrize(
    "fault",
    [pytest.param(fault, id=fault.name, marks=[pytest.mark.long] if fault.starts else []) for fault in FAULTS],
)
def test_fault(tmp_path: Path, cwd: Path, data: list[str], fault: Fault) -> None:
    made = fault.makes(cwd)
    with Bed(tmp_path / "bed", **made) as bed:  # type: ignore[arg-type]
        scene = Scene(bed, cwd, [*data, *SHORT], slots=fault.slots)
        outcome = play(fault, scene)
        wrong = is_right(fault, outcome)
    assert not wrong, "\n".join([*wrong, outcome.output])
