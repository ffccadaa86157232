"""Numbers for captions."""

from __future__ import annotations

import torch

from clap_zero.objective.groups import group_ids, group_sizes


def test_equal_text_has_an_equal_number() -> None:
    ids = group_ids(["a dog barks", "Regen fällt", "a dog barks", "a dog barks ", ""])
    assert ids.dtype == torch.int64
    assert ids[0] == ids[2]
    assert len(set(ids.tolist())) == 4


def test_numbers_are_the_same_everywhere() -> None:
    """Fixed by the text alone: ranks and later versions must agree, unlike Python's own hash."""
    assert group_ids(["a dog barks"]).tolist() == [-7740793073615664075]


def test_sizes() -> None:
    assert group_sizes(torch.tensor([7, -3, 7, 7, 2])).tolist() == [3, 1, 3, 3, 1]
