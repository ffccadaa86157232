from __future__ import annotations

import pytest

from clap_zero.training.schedule import Schedule

COSINE = Schedule(peak=1e-3, minimum=1e-5, warmup_steps=4, max_steps=20, kind="cosine")


def test_warm_up_is_linear_and_peaks_at_its_last_step() -> None:
    assert [COSINE(step) for step in (1, 2, 3, 4)] == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3])


def test_cosine_falls_from_the_peak_to_the_minimum_at_the_last_step() -> None:
    rates = [COSINE(step) for step in range(4, 21)]
    assert rates == sorted(rates, reverse=True)
    assert rates[8] == pytest.approx((1e-3 + 1e-5) / 2)
    assert rates[-1] == pytest.approx(1e-5)


def test_constant_stays_at_the_peak() -> None:
    constant = Schedule(peak=1e-3, minimum=1e-5, warmup_steps=2, max_steps=20, kind="constant")
    assert [constant(step) for step in (1, 2, 3, 20)] == pytest.approx([5e-4, 1e-3, 1e-3, 1e-3])


def test_no_warm_up_starts_near_the_peak() -> None:
    rates = [Schedule(peak=1.0, minimum=0.0, warmup_steps=0, max_steps=10, kind="cosine")(s) for s in range(1, 11)]
    assert rates[0] == pytest.approx(0.9755, abs=1e-4)
    assert rates[-1] == pytest.approx(0.0)


def test_the_only_step_of_a_run_trains() -> None:
    assert Schedule(peak=1.0, minimum=0.0, warmup_steps=0, max_steps=1, kind="cosine")(1) == 1.0


def test_a_warm_up_longer_than_the_run_never_divides_by_zero() -> None:
    assert Schedule(peak=1.0, minimum=0.0, warmup_steps=10, max_steps=10, kind="cosine")(10) == pytest.approx(1.0)
