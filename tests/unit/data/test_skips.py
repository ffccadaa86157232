from __future__ import annotations

import logging

import pytest
import torch

from clap_zero.audio.clips import ClipBatch, FeatureConfig
from clap_zero.data.batch import Batch, LoaderPlan
from clap_zero.data.partition import DataPosition
from clap_zero.data.skips import BLACKLISTED, SkipWatch, bad_limit, reason_kind
from clap_zero.data.stopwatch import STAGES, Stopwatch, describe_wait
from clap_zero.data.tally import Tally
from clap_zero.errors import DataError

PLAN = LoaderPlan(rank=3, world_size=4, micro_batch=8, features=FeatureConfig("rand_trunc"))


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
    watch = SkipWatch(PLAN, 100)
    bad = [(f"t/0.tar::bad{n}", f"FLAC has {n} samples") for n in range(8)]
    watch.see(batch(*bad))
    with pytest.raises(DataError, match=r"13 of 16 .* rank 3.*FLAC has N samples \(13\); the latest: .*bad4 \("):
        watch.see(batch(*bad[:5]))
    assert bad_limit(16, num_samples=100, world_size=4, max_bad_fraction=0.05) == 12.5


def test_blacklisted_samples_are_no_faults(caplog):
    watch = SkipWatch(PLAN, 100)
    with caplog.at_level(logging.WARNING):
        for _ in range(20):
            watch.see(batch(*((f"t/0.tar::{n}", BLACKLISTED) for n in range(8))))
    assert len(caplog.records) == 1 and "data.blacklist" in caplog.text


def test_many_equal_captions_are_said_once(caplog):
    """C04: 32 clips with 4 captions between them."""
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
