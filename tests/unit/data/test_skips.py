from __future__ import annotations

import json
import logging
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from clap_zero.audio.clips import ClipBatch, FeatureConfig
from clap_zero.data.batch import Batch, LoaderPlan
from clap_zero.data.partition import DataPosition, EpochOrder
from clap_zero.data.skip_limit import SkipLimit
from clap_zero.data.skips import BLACKLISTED, EpochFaults, SkipWatch, bad_limit, count_kind, reason_kind
from clap_zero.data.stopwatch import STAGES, Stopwatch, describe_wait
from clap_zero.data.tally import Tally
from clap_zero.distributed.world import init_distributed
from clap_zero.errors import DataError
from clap_zero.testing import run_distributed

PLAN = LoaderPlan(rank=3, world_size=4, micro_batch=8, features=FeatureConfig("rand_trunc"))
ALONE = replace(PLAN, rank=0, world_size=1)


def batch(*skipped: tuple[str, str], epoch: int = 0, captions: int = 8, **change) -> Batch:
    return Batch(
        clips=ClipBatch.from_parts([], []),
        input_ids=torch.zeros(8, 3, dtype=torch.int64),
        attention_mask=torch.ones(8, 3, dtype=torch.int64),
        caption_ids=torch.arange(8) % captions,
        keys=[f"t/0.tar::{n}" for n in range(8)],
        position=DataPosition(epoch, 0),
        micro_index=0,
        skipped=list(skipped),
        **change,
    )


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("empty file (0 bytes)", "empty file"),
        ("FLAC holds samples up to 3.2768e+04, full scale is 1", "FLAC holds samples up to N, full scale is N"),
        ("the index says 20 samples, the shard has 18", "the index says N samples, the shard has N"),
        ("found unknown (starts with 3c 68): Format not recognised", "found unknown"),
        ("the shard cannot be read: Input/output error", "the shard cannot be read"),
        ("'text' is empty", "'text' is empty"),
        (BLACKLISTED, BLACKLISTED),
    ],
)
def test_reasons_are_counted_by_what_is_alike(reason, kind):
    assert reason_kind(reason) == kind


def test_each_bad_sample_is_named_once(caplog):
    watch = SkipWatch(PLAN, 100_000)
    with caplog.at_level(logging.WARNING):
        for epoch in range(3):
            watch.see(batch(("t/0.tar::a", "broken json"), ("t/0.tar::b", "empty"), epoch=epoch))
    assert [r.getMessage() for r in caplog.records] == [
        "rank 3 skipped sample 1: t/0.tar::a (broken json)", "rank 3 skipped sample 2: t/0.tar::b (empty)"
    ]  # fmt: skip


def test_too_many_end_the_run_with_reasons_and_keys():
    watch = SkipWatch(ALONE, 100)
    bad = [(f"t/0.tar::bad{n}", f"FLAC has {n} samples") for n in range(8)]
    watch.see(batch(*bad))
    watch.see(batch(*bad))
    with pytest.raises(DataError, match=r"21 of 24 .* rank 0.*FLAC has N samples \(21\); the latest: .*bad4 \("):
        watch.see(batch(*bad[:5]))
    assert [bad_limit(16, num_samples=n, max_bad_fraction=0.05) for n in (8, 100, 10_000)] == [4, 16, 500]


def test_a_rank_judges_itself_only_where_it_can_read_next_to_nothing():
    watch = SkipWatch(PLAN, 10**6)
    for _ in range(62):
        watch.see(batch(*((f"t/0.tar::bad{n}", "empty") for n in range(8))))
    with pytest.raises(DataError, match="504 of 504 samples of epoch 0 are unusable on rank 3"):
        watch.see(batch(*((f"t/0.tar::bad{n}", "empty") for n in range(8))))
    with_half = SkipWatch(PLAN, 10**6)
    for _ in range(500):
        with_half.see(batch(*((f"t/0.tar::bad{n}", "empty") for n in range(4))))


@pytest.mark.parametrize("world", [1, 8, 512, 4096])
@pytest.mark.parametrize("fault_rate", [0.01, 0.1])
def test_a_hundredth_of_bad_samples_never_ends_a_run_and_a_tenth_does(world, fault_rate):
    """On 4,096 ranks, too, where half of what a rank reads in an epoch is a handful."""
    num_samples, micro_batch = 1_000_000, 8
    rng = np.random.default_rng(0)
    limit = SkipLimit(num_samples=num_samples, max_bad_fraction=0.05)
    watches = [SkipWatch(replace(PLAN, world_size=world, rank=rank), num_samples) for rank in range(min(world, 16))]
    if world == 1:
        watches = [SkipWatch(ALONE, num_samples)]
    ended_at = None
    for step in range(min(200, num_samples // (world * micro_batch)) if world > 1 else 2_000):
        bad = rng.binomial(micro_batch, fault_rate, size=world)
        # The 16 ranks that are watched here meet the worst of it.
        worst = sorted(bad.tolist())[-len(watches) :]
        try:
            for watch, number in zip(watches, worst, strict=True):
                watch.see(batch(*((f"{step}-{n}", "empty") for n in range(number))))
            limit.see(0, num_slots=world * micro_batch, num_bad=int(bad.sum()), skipped=[])
        except DataError:
            ended_at = step
            break
    assert (ended_at is None) == (fault_rate == 0.01), ended_at


def broken_shards_end(num_broken: int, *, num_shards: int, size: int, seed: int, largest_shard: int) -> bool:
    """Whether a run ends over shards without one usable sample, in the order of its first epoch."""
    sizes = np.full(num_shards, size)
    order = EpochOrder(sizes, seed=seed, epoch=0)
    shards, _ = order.locate(np.arange(order.num_samples))
    broken = np.random.default_rng(seed).permutation(num_shards)[:num_broken]
    bad = np.isin(shards, broken)
    limit = SkipLimit(num_samples=order.num_samples, max_bad_fraction=0.05, largest_shard=largest_shard)
    try:
        for first in range(0, order.num_samples, 500):
            here = bad[first : first + 500]
            limit.see(0, num_slots=len(here), num_bad=int(here.sum()), skipped=[])
    except DataError:
        return True
    return False


@pytest.mark.parametrize(("num_shards", "size"), [(2_000, 512), (200, 1_000), (40, 5_000), (20_000, 10)])
def test_broken_shards_end_a_run_when_they_are_too_many_of_the_epoch_and_not_by_where_they_come(num_shards, size):
    allowed = num_shards // 20
    for seed in range(2):
        few, all_allowed, more = (
            broken_shards_end(number, num_shards=num_shards, size=size, seed=seed, largest_shard=size)
            for number in (1, allowed, allowed + 1)
        )
        assert (few, all_allowed, more) == (False, False, True)


def test_what_is_far_too_much_ends_a_run_long_before_its_epoch_does():
    num_samples, ended_by = 10**9, 400_000
    assert bad_limit(ended_by, num_samples=num_samples, max_bad_fraction=0.05, largest_shard=512) < 0.15 * ended_by
    assert bad_limit(15_000, num_samples=num_samples, max_bad_fraction=0.05, largest_shard=512) < 15_000


def test_a_rank_passes_over_a_whole_shard_of_its_own_slots():
    watch = SkipWatch(replace(PLAN, world_size=2, rank=0), 10**6, largest_shard=4_000)
    for _ in range(2_000 // 8):
        watch.see(batch(*((f"t/0.tar::{n}", "the shard cannot be read") for n in range(8))))


def test_a_new_epoch_forgets_the_samples_of_the_one_before():
    watch = SkipWatch(ALONE, 100)
    watch.see(batch(("t/0.tar::old", "empty")))
    with pytest.raises(DataError) as caught:
        for _ in range(3):
            watch.see(batch(*((f"t/0.tar::new{n}", "empty") for n in range(8)), epoch=1))
    assert "::new" in str(caught.value)
    faults = EpochFaults()
    faults.keep("t/0.tar::old", "empty")
    faults.begin(0)
    assert faults.latest == []


def end_together() -> str:
    """What a rank gets when the samples of both together are too bad; each has its own reasons."""
    rank = init_distributed().rank
    limit = SkipLimit(num_samples=100, max_bad_fraction=0.05)
    mine = [(f"t/0.tar::of {rank}", f"reason {'ab'[rank]}"), ("t/0.tar::left", BLACKLISTED)]
    for _ in range(8):
        limit.see(0, num_slots=16, num_bad=2, skipped=mine)
    limit.see(1, num_slots=16, num_bad=2, skipped=mine)
    try:
        for _ in range(8):
            limit.see(1, num_slots=16, num_bad=2, skipped=mine)
    except DataError as error:
        return json.dumps([str(error), error.reported_elsewhere])
    return "[]"


def test_all_ranks_end_together_and_one_says_why():
    first, second = (json.loads(result) for result in run_distributed(end_together, 2))
    assert first[0] == second[0] and (first[1], second[1]) == (False, True)
    assert first[0].startswith("18 of 144 samples of epoch 1 are unusable over all ranks, more than")
    assert "reason a (9), reason b (9)" in first[0] and "of 0 (reason a); t/0.tar::of 1 (reason b)" in first[0]


def test_notes_are_said_some_of_each_kind_in_bounded_memory(caplog):
    watch = SkipWatch(PLAN, 10**6)
    with caplog.at_level(logging.WARNING):
        for n in range(60_000):
            watch._note(f"t/0.tar::{n}: FLAC is cut short: readable to {n}.00 s")
        watch._note("t/0.tar::0: FLAC is cut short: readable to 0.00 s")
        watch._note("t/7.tar: the shard has 3 samples")
    assert len(caplog.records) == 20 + len([2**n for n in range(5, 16)]) + 1
    assert caplog.records[20].getMessage().endswith("(32 such)") and "7.tar" in caplog.records[-1].getMessage()
    assert len(watch._noted._hashes) <= 50_000


def test_very_many_kinds_of_reasons_are_counted_in_bounded_memory():
    counts: Counter[str] = Counter()
    for n in range(2_000):
        count_kind(counts, f"kind {n}")
    count_kind(counts, BLACKLISTED)
    assert len(counts) == 502 and counts["other reasons"] == 1_500 and counts[BLACKLISTED] == 1


def test_blacklisted_samples_are_no_faults(caplog):
    watch = SkipWatch(PLAN, 100)
    with caplog.at_level(logging.WARNING):
        for _ in range(20):
            watch.see(batch(*((f"t/0.tar::{n}", BLACKLISTED) for n in range(8))))
    assert len(caplog.records) == 1 and "data.blacklist" in caplog.text


def test_c04_many_equal_captions_are_said_once(caplog):
    """32 clips with 4 captions between them."""
    watch = SkipWatch(PLAN, 100_000)
    with caplog.at_level(logging.WARNING):
        for _ in range(400):
            watch.see(batch(captions=4))
    assert len(caplog.records) == 1
    assert "500 of 1000 captions equal another one of their micro batch" in caplog.text
    caplog.clear()
    for _ in range(400):
        SkipWatch(PLAN, 100_000).see(batch())
    assert not caplog.records


def test_a_tally_adds_up():
    one, other = Tally(), Tally()
    one.see(batch(("k", "x (1)"), set_ids=torch.tensor([0] * 6 + [2] * 2), num_truncated=3, seconds={"read": 1.0}))
    other.see(batch(("k", "x (2)"), ("l", BLACKLISTED), captions=4, seconds={"read": 0.5, "decode": 2.0}))
    one.add(other)
    assert one.samples == 16 and one.skipped == {"x": 2, BLACKLISTED: 1} and one.num_bad == 2
    assert one.sets == {0: 6, 2: 2} and one.truncated_captions == 3 and one.equal_captions == 4
    assert one.loader_s == {"read": 1.5, "decode": 2.0}


def test_a_stopwatch_counts_what_raises_and_begins_anew():
    watch = Stopwatch()
    with pytest.raises(ZeroDivisionError), watch.measure("decode"):
        1 / 0  # noqa: B018
    taken = watch.take()
    assert tuple(taken) == STAGES and taken["decode"] > 0 and not any(watch.seconds.values())


@pytest.mark.parametrize("stage", STAGES)
def test_the_limit_is_named_with_a_way_out(stage):
    line = describe_wait(0.34, {name: 9.0 if name == stage else 1.0 for name in STAGES})
    assert line.startswith(f"steps wait 34% of the time for data; of the loader's time {stage} takes 60%: ")
    assert len(line.partition("%: ")[2]) > 10
    assert describe_wait(0.2, {}) == "steps wait 20% of the time for data"


def test_names_of_others_do_not_break_lines_or_write_to_the_terminal(caplog):
    watch = SkipWatch(PLAN, 1_000)
    key = "train/0.tar::a\nrank 0: all is well\x1b[2J\udcff"
    with caplog.at_level(logging.WARNING):
        watch.see(batch((key, "no sound"), notes=[f"{key}: is odd"]))
    assert len(caplog.records) == 2
    assert all(record.getMessage().isprintable() and "a\\nrank 0" in record.getMessage() for record in caplog.records)


def test_notes_of_very_many_kinds_are_not_all_said(caplog):
    watch = SkipWatch(PLAN, 1_000_000)
    letters = [f"{a}{b}{c}" for a in "abcdefghijkl" for b in "abcdefghijkl" for c in "abcdefghijkl"]
    with caplog.at_level(logging.WARNING):
        watch.see(batch(notes=[f"train/0.tar: is {word}" for word in letters]))
    assert 500 < len(caplog.records) < 550
