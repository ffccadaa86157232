"""What a mixture of weighted data sets takes of each, when, and that it is mixed."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from clap_zero.config.data import DataSetSection
from clap_zero.data import mixture
from clap_zero.data.index import load_index
from clap_zero.data.mixture import Part, epoch_pieces, natural_pieces, refuse_too_many, samples_per_epoch
from clap_zero.data.partition import EpochOrder
from clap_zero.errors import DataError
from tests.unit.data.shard_files import write_split


@pytest.mark.parametrize(
    ("stored", "weight", "taken"), [(10, 1, 10), (10, 0.5, 5), (10, 2.5, 25), (3, 0.1, 1), (0, 2, 0), (7, 0.5, 4)]
)
def test_samples_of_an_epoch(stored, weight, taken):
    assert samples_per_epoch(stored, weight) == taken


def test_sample_counts_stay_exact_for_large_numbers():
    assert samples_per_epoch(3_333_333_333_333, 0.1) == round(Fraction(0.1) * 3_333_333_333_333)


def counts_of(pieces, num_shards: int, size: int) -> np.ndarray:
    """How often each sample is taken, (num_shards, size)."""
    counts = np.zeros((num_shards, size), dtype=int)
    for shard, first, count in zip(pieces.shards, pieces.firsts, pieces.counts, strict=True):
        counts[shard, first : first + count] += 1
    return counts


def test_after_any_number_of_epochs_all_samples_were_seen_equally_often_but_for_one():
    rng = np.random.default_rng(3)
    for _ in range(400):
        sizes = rng.integers(0, 6, size=rng.integers(1, 6))
        sizes[0] += 1
        weight = float(rng.choice([0.1, 0.3, 0.5, 0.7, 1, 1.3, 2, 3.9]))
        part = Part(0, len(sizes), samples_per_epoch(int(sizes.sum()), weight))
        seen = np.zeros((len(sizes), 10), dtype=int)
        there = np.arange(10) < sizes[:, None]
        for epoch in range(8):
            pieces = epoch_pieces(sizes, [part], seed=5, epoch=epoch)
            assert pieces.counts.sum() == part.num_samples and (pieces.counts > 0).all()
            seen += counts_of(pieces, len(sizes), 10)
            assert seen[~there].sum() == 0
            assert seen[there].max() - seen[there].min() <= 1


def test_whole_weights_take_whole_passes_and_halves_take_the_other_half_next():
    sizes = np.array([4, 4, 4, 4])
    for weight, expected in ((1, {1}), (3, {3})):
        part = Part(0, 4, samples_per_epoch(16, weight))
        assert set(counts_of(epoch_pieces(sizes, [part], seed=0, epoch=7), 4, 4).ravel().tolist()) == expected
    half = Part(0, 4, 8)
    first, second = (counts_of(epoch_pieces(sizes, [half], seed=0, epoch=epoch), 4, 4) for epoch in (0, 1))
    assert ((first + second) == 1).all() and set(first.ravel().tolist()) == {0, 1}
    # The halves of later passes are others.
    assert any((counts_of(epoch_pieces(sizes, [half], seed=0, epoch=n), 4, 4) != first).any() for n in (2, 4, 6))


def test_a_small_set_is_spread_over_the_whole_epoch():
    sizes = np.concatenate([np.full(400, 8), np.full(40, 8)])
    parts = [Part(0, 400, 3200), Part(400, 40, 320)]
    for epoch in range(5):
        pieces = epoch_pieces(sizes, parts, seed=1, epoch=epoch)
        places = np.flatnonzero(pieces.shards >= 400)
        # One in each of 40 equal parts of the epoch, up to the jitter of its neighbours.
        expected = (np.arange(40) + 0.5) * 11
        assert np.abs(places - expected).max() <= 11
        gaps = np.diff(places)
        assert len(set(gaps.tolist())) > 5, "jittered, not a comb"


def test_sets_do_not_share_their_order():
    sizes = np.full(100, 4)
    alike = epoch_pieces(sizes, [Part(0, 50, 200), Part(50, 50, 200)], seed=0, epoch=0)
    first = alike.shards[alike.shards < 50]
    second = alike.shards[alike.shards >= 50] - 50
    assert first.tolist() != second.tolist()


def test_an_added_set_does_not_change_the_passes_of_the_others():
    sizes = np.full(30, 4)
    alone = epoch_pieces(sizes[:20], [Part(0, 20, 80)], seed=0, epoch=2).shards
    mixed = epoch_pieces(sizes, [Part(0, 20, 80), Part(20, 10, 40)], seed=0, epoch=2).shards
    assert mixed[mixed < 20].tolist() == alone.tolist()


def test_empty_sets_and_shards_take_no_place():
    sizes = np.array([0, 3, 0, 0, 2])
    pieces = epoch_pieces(sizes, [Part(0, 3, 3), Part(3, 1, 0), Part(4, 1, 2)], seed=0, epoch=0)
    assert sorted(pieces.shards.tolist()) == [1, 4]
    natural = natural_pieces(sizes)
    assert natural.shards.tolist() == [0, 1, 2, 3, 4] and natural.counts.tolist() == [0, 3, 0, 0, 2]


def mixing(shards: np.ndarray, samples: np.ndarray, *, block: int) -> tuple[float, float]:
    """Two statistics of a sequence of equally large shards, in units of what chance gives (1 and 0).

    Args:
        shards, samples: the sequence, (n,) each.
        block: samples that are mixed together.

    Returns:
        Spread of the shards over windows of a block (0: dealt out evenly, large: shard after shard), and the largest
        correlation of a place in the sequence with the sample's number in its shard.
    """
    window = block // 8
    ratios, correlations = [], []
    for start in range(0, len(shards), block):
        here = shards[start : start + block]
        numbers, inverse = np.unique(here, return_inverse=True)
        for first in range(0, block, window):
            found = np.bincount(inverse[first : first + window], minlength=len(numbers))
            share = window / len(numbers)
            chance = share * (1 - 1 / len(numbers)) * (block - window) / (block - 1)  # hypergeometric variance
            ratios.append(((found - share) ** 2).mean() / chance)
        for number in numbers:
            correlations.append(
                np.corrcoef(np.arange((here == number).sum()), samples[start:][:block][here == number])[0, 1]
            )
    return float(np.mean(ratios)), float(np.abs(np.mean(correlations)))


def test_samples_are_mixed_across_shards_and_within_them():
    order = EpochOrder(np.full(64, 64), seed=4, epoch=1, shuffle_shards=16)
    shards, samples = order.locate(np.arange(64 * 64))
    spread, correlation = mixing(shards, samples, block=16 * 64)
    assert 0.85 < spread < 1.15
    assert correlation < 0.06


@pytest.mark.parametrize("broken", ["shard after shard", "dealt out", "half mixed"])
def test_the_statistics_fail_a_broken_shuffle(broken):
    rng = np.random.default_rng(0)
    shards, samples = np.repeat(np.arange(16), 64), np.tile(np.arange(64), 16)
    if broken == "dealt out":  # round robin: each shard's samples in their order
        order = np.argsort(samples, kind="stable")
    elif broken == "half mixed":  # a buffer much smaller than the block
        order = np.concatenate([part + rng.permutation(128) for part in range(0, 1024, 128)])
    else:
        order = np.arange(1024)
    spread, correlation = mixing(shards[order], samples[order], block=1024)
    assert not 0.85 < spread < 1.15 or correlation >= 0.06


def test_shards_meet_others_in_each_epoch():
    num_shards, block = 64, 16
    together = np.zeros((num_shards, num_shards))
    for epoch in range(60):
        shards, _ = EpochOrder(np.full(num_shards, 4), seed=0, epoch=epoch, shuffle_shards=block).locate(np.arange(256))
        for start in range(0, 256, block * 4):
            here = np.unique(shards[start : start + block * 4])
            assert len(here) == block
            together[np.ix_(here, here)] += 1
    met = together[np.triu_indices(num_shards, 1)] / 60
    expected = (block - 1) / (num_shards - 1)
    assert abs(met.mean() - expected) < 0.01
    # Binomial over 60 epochs: no pair is bound together, none is kept apart.
    assert met.std() < 1.3 * np.sqrt(expected * (1 - expected) / 60)
    assert met.max() < 0.6 and met.min() > 0


def test_the_order_gives_the_very_samples_of_the_pieces():
    sizes = np.array([5, 9, 3, 8])
    part = Part(0, 4, samples_per_epoch(25, 0.3))
    seen = np.zeros((4, 9), dtype=int)
    for epoch in range(10):
        order = EpochOrder(sizes, seed=2, epoch=epoch, shuffle_shards=2, parts=[part])
        here = np.zeros_like(seen)
        np.add.at(here, order.locate(np.arange(order.num_samples)), 1)
        assert (here == counts_of(epoch_pieces(sizes, [part], seed=2, epoch=epoch), 4, 9)).all()
        seen += here
    there = seen[np.arange(9) < sizes[:, None]]
    assert there.sum() == 70 and set(there.tolist()) == {2, 3}


def test_more_pieces_than_can_be_planned_are_refused_by_name():
    refuse_too_many([("small", 10, 1000.0), ("large", 1_000_000, 5.0)])
    with pytest.raises(DataError, match=r"data set large has 1,000,000 shards with weight 1000.*1,000,000,000 shards"):
        refuse_too_many([("small", 10, 1.0), ("large", 1_000_000, 1000.0)])


def test_an_index_refuses_such_a_weight(tmp_path, monkeypatch):
    monkeypatch.setattr(mixture, "MAX_PIECES", 5)
    place = str(write_split(tmp_path / "train", [2, 2]))
    assert load_index([DataSetSection(shards=(place,), weight=2)]).num_samples == 8
    with pytest.raises(DataError, match="lower the weights"):
        load_index([DataSetSection(shards=(place,), weight=3)])
