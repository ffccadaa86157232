"""The comparison behind the tests of gradients."""

from __future__ import annotations

import math

import pytest

from tests.worst import worst


@pytest.mark.parametrize("place", range(3))
def test_what_is_not_a_number_is_the_worst(place: int) -> None:
    errors = dict(zip("abc", (1e-7, 1e-6, 1e-5), strict=True))
    assert worst(errors) == (1e-5, "c")
    name = "abc"[place]
    value, found = worst({**errors, name: math.nan})
    assert math.isnan(value) and found == name
    assert not value <= 1.0
