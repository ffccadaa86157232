from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from clap_zero.data.patterns import (
    describe_missing,
    expand_braces,
    expand_by_directory,
    natural_order,
    natural_sorted,
    spread,
)
from clap_zero.errors import DataError

DIGIT_NAMES = st.lists(st.from_regex(r"\A(s-?)?[0-9]{1,3}(\.tar|a1)?\Z"), unique=True)


@given(DIGIT_NAMES | st.lists(st.text("ab019.-٣²", max_size=5), unique=True))
@example(["1.tar", "01.tar", "10.tar", "2.tar"])
@example(["1", "10", "11", ""])
@example(["s1a", "s1", "s12a"])
@example(["²", "1"])
def test_the_quick_way_sorts_as_the_slow_one(names):
    assert natural_sorted(names) == sorted(names, key=natural_order)


def test_two_million_digits_are_no_number_to_be_afraid_of():
    names = [f"{'9' * 30}{n}.tar" for n in (2, 10, 1)]
    assert natural_sorted(names) == sorted(names, key=natural_order)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("/d/{0..1}.tar", {"/d/": ["0.tar", "1.tar"]}),
        ("/{a,b}/{0..1}.tar", {"/a/": ["0.tar", "1.tar"], "/b/": ["0.tar", "1.tar"]}),
        ("/{a/0,b/1}.tar", {"/a/": ["0.tar"], "/b/": ["1.tar"]}),
        ("x.tar", {"": ["x.tar"]}),
        ("s3://b/{train}/0.tar", {"s3://b/{train}/": ["0.tar"]}),
    ],
)
def test_names_by_directory(pattern, expected):
    assert expand_by_directory(pattern) == expected


def test_too_many_names_are_refused_before_they_are_made():
    with pytest.raises(DataError, match="more than"):
        expand_by_directory("/{0..9999}/{0..9999}.tar")


def test_spread_takes_both_ends():
    assert spread(range(100), 4) == [0, 33, 66, 99]
    assert spread([5], 8) == [5] and spread([], 8) == []
    assert spread(np.arange(3), 8) == [0, 1, 2]


def test_a_long_list_of_missing_shards_is_cut():
    message = describe_missing("p", [f"/d/{n}.tar" for n in range(50)], 60, {"/d/": ["99.tar", "x.txt"]})
    assert message.startswith("p: 50 of 60 shards are missing: /d/0.tar, ") and "/d/9.tar, ..." in message
    assert "there are 1 tars, 99.tar to 99.tar" in message


@pytest.mark.parametrize("pattern", ["/d/{a,{b,c}}.tar", "/{x{0..3},y}/0.tar"])
def test_braces_within_braces_are_refused(pattern):
    with pytest.raises(DataError, match="braces within braces"):
        expand_by_directory(pattern)


def test_signatures_in_patterns_are_not_printed():
    with pytest.raises(DataError) as caught:
        expand_braces("https://me:secret@h/{0..99999999}.tar?sig=secret")
    assert "secret" not in str(caught.value)


def test_numbers_of_any_length_can_be_sorted_and_compared():
    names = ["9" * 5_000 + ".tar", "1.tar"]
    assert natural_sorted([*names, "x"])[0] == "1.tar"
    assert "missing" in describe_missing("p", ["/d/" + names[0]], 1, {"/d/": names})
