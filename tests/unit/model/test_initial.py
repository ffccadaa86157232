"""Initial weights: a function of seed and geometry, distributed as transformers draws them."""

from __future__ import annotations

import pytest
import torch
from transformers import ClapModel

from clap_zero.model.geometry import clap_config
from tests.distributed import zero_cases as zc


def test_the_same_seed_gives_the_same_weights_whatever_was_drawn_before() -> None:
    a = zc.build({}, fused=True, seed=5).state_dict()
    torch.rand(7)
    before = torch.random.get_rng_state()
    b = zc.build({}, fused=True, seed=5).state_dict()
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(a[n], b[n]) for n in a)


def test_another_seed_gives_other_weights_and_no_two_modules_share_them() -> None:
    a, b = (dict(zc.build({}, fused=True, seed=seed).named_parameters()) for seed in (5, 6))
    drawn = [n for n, p in a.items() if p.numel() > 1 and p.std() > 0]
    assert len(drawn) > 30
    assert not any(torch.equal(a[n], b[n]) for n in drawn)
    firsts = [a[n].flatten()[:4].tolist() for n in drawn]
    assert len({tuple(first) for first in firsts}) == len(drawn)


def test_distributions_are_those_of_transformers() -> None:
    """Constants equal, drawn weights with the same mean and spread within what their number allows."""
    geometry = zc.tiny_geometry(fused=True)
    torch.manual_seed(0)
    theirs = ClapModel(clap_config(geometry)).state_dict()
    ours = zc.build({}, fused=True).state_dict()
    for name, expected in theirs.items():
        value = ours[name]
        assert torch.isfinite(value).all(), name
        if not expected.is_floating_point() or expected.numel() == 1 or expected.std() == 0:
            assert torch.equal(value.reshape(expected.shape), expected), name
        else:
            margin = 5 / expected.numel() ** 0.5
            assert value.std().item() == pytest.approx(expected.std().item(), rel=margin), name
            assert abs(value.mean()) < margin * expected.std(), name
