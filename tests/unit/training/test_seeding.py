from __future__ import annotations

import itertools

import torch

from clap_zero.training.seeding import derive_seed, seed_micro_batch


def test_seeds_are_the_same_everywhere_and_differ_by_every_part() -> None:
    assert derive_seed("micro", 0, 1, 0, 0) == 7368523946880874572
    seeds = {derive_seed("micro", *parts) for parts in itertools.product(range(3), repeat=4)}
    assert len(seeds) == 81
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_joined_parts_do_not_collide() -> None:
    assert derive_seed(1, 11) != derive_seed(11, 1)


def test_a_micro_batch_draws_the_same_numbers_again() -> None:
    def draw(**place: int) -> torch.Tensor:
        seed_micro_batch(seed=7, **place)
        return torch.rand(8)

    first = draw(step=3, micro_index=1, rank=0)
    torch.rand(100)
    assert torch.equal(first, draw(step=3, micro_index=1, rank=0))
    assert not torch.equal(first, draw(step=3, micro_index=1, rank=1))
    assert not torch.equal(first, draw(step=4, micro_index=1, rank=0))
