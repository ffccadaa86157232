"""Data sets of an index: names, weights, caption rules; and what a weight does to an epoch."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from clap_zero.audio.clips import FeatureConfig
from clap_zero.config.data import DataSection, DataSetSection
from clap_zero.data.captions import CaptionRule
from clap_zero.data.index import index_of, load_index, policy_of
from clap_zero.data.loader import LoaderPlan, eval_batches, train_batches
from clap_zero.data.places import ReadPolicy
from clap_zero.data.sets import name_sets
from clap_zero.errors import DataError
from tests.unit.data.shard_files import write_split


def named(*entries) -> list[tuple[str, tuple[str, ...]]]:
    return [(one.name, one.patterns) for one in name_sets(entries, "text")]


def test_names_are_the_last_two_parts_and_no_two_are_alike():
    assert [name for name, _ in named("/d/a/train", "s3://b/a/train/", "/x/a/train/{0..9}.tar", "/d/a/test")] == [
        "a/train",
        "a/train (2)",
        "a/train (3)",
        "a/test",
    ]
    assert named("train")[0][0] == "train"
    assert named("https://h/a/train?key=secret")[0][0] == "a/train"
    assert [n for n, _ in named("/d/a/train", DataSetSection(shards="x", name="a/train"))] == ["a/train (2)", "a/train"]


def test_tars_of_one_directory_are_one_set():
    assert named("/d/a/0.tar", "/d/a/1.tar", "/d/b/0.tar", "/d/a/2.tar") == [
        ("d/a", ("/d/a/0.tar", "/d/a/1.tar")),
        ("d/b", ("/d/b/0.tar",)),
        ("d/a (2)", ("/d/a/2.tar",)),
    ]


def test_caption_rules_come_from_the_set_or_the_section():
    entries = [
        "a",
        DataSetSection(shards=("b",), tags="always", tag_key="t", tag_template="{tags}!"),
        DataSetSection(shards=("c",), caption_key="k", caption_templates=("a {caption}",)),
    ]
    assert [one.rule for one in name_sets(entries, "caption")] == [
        CaptionRule(caption_key="caption"),
        CaptionRule(caption_key="caption", tags="always", tag_key="t", tag_template="{tags}!"),
        CaptionRule(caption_key="k", caption_templates=("a {caption}",)),
    ]


@pytest.fixture
def mixed(tmp_path):
    """Three splits of 10, 4 and 6 samples, the second with weight 2.5, the third with 0.5."""
    places = [
        write_split(tmp_path / name / "train", sizes) for name, sizes in (("a", [6, 4]), ("b", [4]), ("c", [1, 5]))
    ]
    entries = [
        str(places[0]),
        DataSetSection(shards=(str(places[1]),), weight=2.5, name="small"),
        DataSetSection(shards=(str(places[2] / "{0..1}.tar"),), weight=0.5),
    ]
    return load_index(entries)


def test_counts_of_an_epoch_and_of_what_is_stored(mixed):
    assert (mixed.num_shards, mixed.num_stored, mixed.num_samples) == (5, 20, 10 + 10 + 3)
    assert [(one.name, one.first_shard, one.num_shards, one.num_stored, one.num_samples) for one in mixed.sets] == [
        ("a/train", 0, 2, 10, 10),
        ("small", 2, 1, 4, 10),
        ("c/train", 3, 2, 6, 3),
    ]
    assert [mixed.shard(n).set_id for n in range(5)] == [0, 0, 1, 2, 2]
    assert [mixed.key_prefix(n) for n in (0, 2, 4)] == ["a/train/0.tar", "b/train/0.tar", "c/train/1.tar"]
    order = mixed.order(seed=0, epoch=0)
    shards, _ = order.locate(np.arange(order.num_samples))
    assert np.bincount([mixed.set_id(int(n)) for n in shards]).tolist() == [10, 10, 3]
    natural = mixed.order(seed=0, epoch=0, shuffle=False)
    assert natural.num_samples == 20, "evaluation sees each stored sample once"


def test_an_index_travels_and_stays_the_same(mixed):
    again = pickle.loads(pickle.dumps(mixed))
    assert again.fingerprint == mixed.fingerprint and again.sets == mixed.sets
    assert [again.shard(n) for n in range(5)] == [mixed.shard(n) for n in range(5)]


def test_the_fingerprint_knows_weights_and_the_split_into_sets(tmp_path):
    places = [str(write_split(tmp_path / name / "train", [3, 2])) for name in ("a", "b")]
    one_set = DataSetSection(shards=tuple(places))
    heavy = DataSetSection(shards=(places[0],), weight=2)
    prints = {load_index(e).fingerprint for e in (places, places[::-1], [one_set], [heavy, places[1]])}
    assert len(prints) == 4
    # The name and the captions of a set do not change what is read when.
    assert load_index([DataSetSection(shards=(places[0],), name="x"), places[1]]).fingerprint in prints


def test_a_set_without_a_pair_is_named(tmp_path):
    good, bad = write_split(tmp_path / "a" / "train", [3]), write_split(tmp_path / "b" / "train", [0])
    with pytest.raises(DataError, match="the data set b/train has no usable pair"):
        load_index([str(good), str(bad)])


def test_batches_hold_the_sets_in_their_shares(mixed):
    plan = LoaderPlan(rank=0, world_size=1, micro_batch=23, features=FeatureConfig("rand_trunc"))
    batch = next(train_batches(mixed, plan=plan))
    assert np.bincount(np.asarray(batch.set_ids), minlength=3).tolist() == [10, 10, 3]
    keys = [key.split("/")[0] for key in batch.keys]
    assert [keys.count(name) for name in "abc"] == [10, 10, 3]


def test_evaluation_takes_every_stored_sample_once_whatever_the_weights(mixed):
    plan = LoaderPlan(rank=0, world_size=1, micro_batch=8, features=FeatureConfig("rand_trunc"))
    seen = [
        key for batch in eval_batches(mixed, plan=plan) for key, ok in zip(batch.keys, batch.valid, strict=True) if ok
    ]
    assert len(seen) == len(set(seen)) == 20


def test_the_settings_of_a_run_reach_the_index(tmp_path):
    split = write_split(tmp_path / "train", [2, 2])
    (split / "1.tar").unlink()
    data = DataSection(
        train=(str(split),), missing_shards="skip", cache_dir="c", cache_bytes=7, remote_timeout_s=3, remote_retries=1,
        allow_pipe=True, caption_key="k",
    )  # fmt: skip
    assert policy_of(data) == ReadPolicy("c", 7, 3, 1, allow_pipe=True, missing="skip")
    index = index_of(data.train, data)
    assert index.sizes.tolist() == [2] and index.sets[0].rule.caption_key == "k"
