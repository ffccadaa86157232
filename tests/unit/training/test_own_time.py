"""A rank's own time: computing counts, waiting for others does not; the parts of a start add up."""

from __future__ import annotations

import re
import time

import pytest

from clap_zero.phases import phase
from clap_zero.training.own_time import OWN_PHASES, DeviceTimer, OwnTime
from clap_zero.training.start_up import told_first_step, told_start


def compute(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


def test_waits_for_data_and_computing_count_and_waits_for_ranks_do_not() -> None:
    own = OwnTime(DeviceTimer(on_device=False), on_gpu=False)
    own.begin()
    with phase("forward"):
        with phase("data"):
            time.sleep(0.1)
        compute(0.1)
    with phase("backward"):
        time.sleep(0.2)  # as in a collective
    seconds = dict(zip(OWN_PHASES, own.take(), strict=True))
    assert seconds["data"] == pytest.approx(0.1, abs=0.05)
    assert seconds["forward"] == pytest.approx(0.1, abs=0.05)
    assert seconds["backward"] < 0.05


def test_each_step_counts_from_where_the_ranks_met() -> None:
    own = OwnTime(DeviceTimer(on_device=False), on_gpu=False)
    own.begin()
    with phase("forward"):
        compute(0.05)
    own.take()
    own.restart()
    own.begin()
    assert sum(own.take()) < 0.03


def test_on_a_gpu_only_what_holds_no_collective_counts() -> None:
    own = OwnTime(DeviceTimer(on_device=False), on_gpu=True)
    own.begin()
    with phase("backward"):
        compute(0.05)
    seconds = dict(zip(OWN_PHASES, own.take(), strict=True))
    assert seconds["forward"] == seconds["backward"] == seconds["optimizer"] == 0


def test_the_parts_of_a_start_add_up() -> None:
    line = told_start()
    total, parts = re.fullmatch(r"start-up ([\d.]+) s: (.*)", line).groups()  # type: ignore[union-attr]
    seconds = [float(part.split()[-1]) for part in parts.split(", ")]
    assert float(total) == pytest.approx(sum(seconds), abs=0.4)
    assert [part.split()[0] for part in parts.split(", ")][-1] == "own"
    assert re.match(r"first step after [\d.]+ s: start-up [\d.]+, evaluation ", told_first_step())
