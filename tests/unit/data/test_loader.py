from __future__ import annotations

import itertools
import json
import logging

import numpy as np
import pytest

from clap_zero.audio.clips import FeatureConfig
from clap_zero.data.captions import caption_id
from clap_zero.data.index import load_index
from clap_zero.data.loader import eval_batches, train_batches
from clap_zero.data.partition import DataPosition
from clap_zero.errors import ConfigError, DataError
from tests.unit.data.shard_files import audio_bytes, pair, write_split, write_tar
from tests.unit.data.taking import FUSION, keys_of, plan, take


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    return load_index([str(write_split(tmp_path_factory.mktemp("data") / "train", [10, 6, 8]))])


def test_every_sample_once_per_epoch_in_another_order_each_time(index):
    epochs = [[], []]
    for rank in range(2):
        for batch in take(index, 6, rank=rank, world_size=2):
            epochs[batch.position.epoch] += batch.keys
    assert [len(keys) for keys in epochs] == [24, 24]
    assert len(set(epochs[0])) == 24 and set(epochs[0]) == set(epochs[1])
    assert epochs[0] != epochs[1]
    assert keys_of(take(index, 6)) == keys_of(take(index, 6))
    assert keys_of(take(index, 6)) != keys_of(take(index, 6, seed=1))


def test_batches_are_what_they_say(index):
    first, second = take(index, 2, accumulation=2)
    assert first.position == second.position == DataPosition(0, 0)
    assert (first.micro_index, second.micro_index) == (0, 1)
    assert first.clips.samples.dtype.__str__() == "torch.int16" and len(first.clips) == len(first) == 4
    assert first.input_ids.shape == first.attention_mask.shape and first.input_ids.shape[0] == 4
    assert len(set(first.caption_ids.tolist())) == 4
    assert all(key.startswith("train/") and "::s" in key for key in first.keys)


def test_the_samples_are_those_of_their_keys(index, tmp_path):
    import io

    import soundfile

    for batch in take(index, 3):
        start = 0
        for key, length in zip(batch.keys, batch.clips.lengths.tolist(), strict=True):
            expected, _ = soundfile.read(io.BytesIO(audio_bytes(int(key[-4:]))), dtype="float32")
            got = batch.clips.samples[start : start + length].numpy()
            np.testing.assert_array_equal(got, (expected * np.float32(32767)).astype(np.int16))
            start += length


@pytest.mark.parametrize("start", [DataPosition(0, 8), DataPosition(1, 16)])
def test_a_run_goes_on_where_it_stood(index, start):
    whole = take(index, 16)
    number = next(n for n, batch in enumerate(whole) if batch.position == start)
    rest = take(index, 4, position=start)
    assert keys_of(rest) == keys_of(whole[number : number + 4])
    assert all((a.clips.samples == b.clips.samples).all() for a, b in zip(rest, whole[number:], strict=False))


def test_more_ranks_see_the_same_global_batches(index):
    one = [sorted(batch.keys) for batch in take(index, 6, micro_batch=8)]
    ranks = [take(index, 6, rank=rank, world_size=2, micro_batch=4) for rank in range(2)]
    assert [sorted(a.keys + b.keys) for a, b in zip(*ranks, strict=True)] == one


def test_workers_change_nothing_and_none_is_left(index):
    reference = take(index, 9, accumulation=2)
    for workers in (1, 3):
        found = take(index, 9, accumulation=2, workers=workers)
        assert [(b.keys, b.position, b.micro_index) for b in found] == [
            (b.keys, b.position, b.micro_index) for b in reference
        ]
        assert all((a.clips.samples == b.clips.samples).all() for a, b in zip(found, reference, strict=True))
        assert all((a.input_ids == b.input_ids).all() for a, b in zip(found, reference, strict=True))


def test_crops_differ_over_ranks_and_epochs_and_repeat_with_the_seed(tmp_path):
    """One long clip in every sample: what is cut tells where."""
    features = FeatureConfig("rand_trunc", max_samples=48_000)
    clip = audio_bytes(7, seconds=2.0)
    members = [m for n in range(16) for m in ((f"{n}.flac", clip), (f"{n}.txt", b"noise"))]
    write_tar(tmp_path / "train" / "0.tar", members)
    index = load_index([str(tmp_path / "train")])

    def crops(**change) -> list[bytes]:
        found = []
        for rank in range(2):
            for batch in take(index, 4, rank=rank, world_size=2, features=features, **change):
                assert batch.clips.lengths.tolist() == [48_000] * 4
                found += [part.numpy().tobytes() for part in batch.clips.samples.split(48_000)]
        return found

    first = crops()
    assert len(set(first)) == 32  # 2 ranks x 2 epochs x 8 samples: all differ
    assert first == crops() and first == crops(workers=2)
    assert set(first).isdisjoint(crops(seed=1))


def test_captions_are_drawn_anew_each_epoch(tmp_path):
    members = pair("a", 1, text=[f"caption {n}" for n in range(50)])
    write_tar(tmp_path / "train" / "0.tar", members)
    index = load_index([str(tmp_path / "train")])
    drawn = [int(batch.caption_ids) for batch in take(index, 12, micro_batch=1)]
    assert len(set(drawn)) > 6
    assert drawn == [int(batch.caption_ids) for batch in take(index, 12, micro_batch=1)]


def test_fusion_chunks_come_from_each_third(tmp_path):
    write_tar(tmp_path / "train" / "0.tar", pair("long", 1, seconds=35.0) + pair("short", 2))
    index = load_index([str(tmp_path / "train")])
    (batch,) = take(index, 1, micro_batch=2, features=FUSION, max_seconds=30.0)
    long = batch.clips.lengths.tolist().index(30 * 48_000)
    starts = batch.clips.chunk_starts[long].tolist()
    assert starts[0] < 667 <= starts[1] < 1334 <= starts[2] <= 2000
    assert batch.clips.chunk_starts[1 - long].tolist() == [0, 0, 0]


def test_a_bad_sample_is_replaced_and_reported(tmp_path, caplog):
    members = [m for n in range(19) for m in pair(f"s{n:04d}", n)]
    members += [("bad audio.flac", b"fLaC junk"), ("bad audio.json", b'{"text": "x"}')]
    members += [("no text.flac", audio_bytes(50)), ("no text.json", b'{"text": []}')]
    members += [("empty.wav", b""), ("empty.txt", b"x")]
    write_tar(tmp_path / "train" / "0.tar", members)
    index = load_index([str(tmp_path / "train")])
    assert index.num_samples == 22
    with caplog.at_level(logging.WARNING):
        batches = take(index, 11, micro_batch=2)
    assert all(len(batch) == 2 for batch in batches)
    skipped = dict(entry for batch in batches for entry in batch.skipped)
    assert set(skipped) == {"train/0.tar::bad audio", "train/0.tar::no text", "train/0.tar::empty"}
    assert "'text' is empty" in skipped["train/0.tar::no text"] and "0 bytes" in skipped["train/0.tar::empty"]
    good = keys_of(batches)
    assert len(good) == 22 and len(set(good)) == 19  # all good ones, and three of them twice
    assert "bad audio" in caplog.text
    assert keys_of(take(index, 11, micro_batch=2, workers=2)) == good


def test_too_many_bad_samples_end_the_run_with_their_list(tmp_path):
    members = [m for n in range(40) for m in pair(f"s{n:04d}", n)]
    members += [m for n in range(20) for m in ((f"bad{n}.flac", b"junk"), (f"bad{n}.txt", b"x"))]
    write_tar(tmp_path / "train" / "0.tar", members)
    index = load_index([str(tmp_path / "train")])
    with pytest.raises(DataError, match=r"17 of \d+ samples of epoch 0 .*max_bad_fraction.*::bad"):
        take(index, 60, micro_batch=1)
    assert len(take(index, 60, micro_batch=1, max_bad_fraction=0.5)) == 60


@pytest.mark.parametrize(("good", "bad"), [(8, 12), (3, 5)])
def test_more_bad_than_good_ones_of_few_end_the_run(tmp_path, good, bad):
    members = [m for n in range(good) for m in pair(f"s{n:04d}", n)]
    members += [m for n in range(bad) for m in ((f"bad{n}.flac", b"junk"), (f"bad{n}.txt", b"x"))]
    write_tar(tmp_path / "train" / "0.tar", members)
    index = load_index([str(tmp_path / "train")])
    with pytest.raises(DataError, match="are unusable on rank 0"):
        take(index, good + bad, micro_batch=1)
    assert len(take(index, good + bad, micro_batch=1, max_bad_fraction=0.9)) == good + bad


def test_fewer_samples_than_declared(tmp_path, caplog):
    split = write_split(tmp_path / "train", [18])
    (split / "sizes.json").write_text('{"0.tar": 20}')
    index = load_index([str(split)])
    with caplog.at_level(logging.WARNING):
        batches = take(index, 5)
    assert len(set(keys_of(batches))) == 18
    assert sorted(key for batch in batches for key, _ in batch.skipped) == ["train/0.tar::#18", "train/0.tar::#19"]
    assert "has 18 pairs, the index says 20" in caplog.text


def test_a_shard_cut_short_loses_only_its_end(tmp_path, caplog):
    split = write_split(tmp_path / "train", [16] * 8)
    path = split / "3.tar"
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * 0.7)])
    flipped = split / "5.tar"
    data = bytearray(flipped.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 4096] = bytes(b ^ 0xFF for b in data[len(data) // 2 : len(data) // 2 + 4096])
    flipped.write_bytes(data)
    index = load_index([str(split)])
    with caplog.at_level(logging.WARNING):
        batches = take(index, 32)
    lost = {key for batch in batches for key, _ in batch.skipped}
    assert 4 <= len(lost) <= 9
    assert len(set(keys_of(batches))) == 128 - len(lost)
    assert f"{path} " in caplog.text and "cut short" in caplog.text and "damaged" in caplog.text


def test_fewer_samples_than_a_global_batch_is_refused_with_the_numbers(index):
    with pytest.raises(DataError, match=r"global batch of 32 \(4 micro x 2 accumulation x 4 ranks\).*24 samples"):
        train_batches(index, plan=plan(world_size=4, accumulation=2))


def test_settings_out_of_range_are_refused(index):
    for change in ({"max_caption_tokens": 513}, {"max_caption_tokens": 2}, {"workers": -1}, {"micro_batch": 0}):
        with pytest.raises(ConfigError):
            train_batches(index, plan=plan(**change))


def test_only_incomplete_samples_behind_a_count(tmp_path):
    """The first shards are fine, the rest is not: found at run time, and never a hang."""
    write_tar(tmp_path / "train" / "0.tar", [("k.input.flac", audio_bytes(1)), ("k.outputs.txt", b"x")])
    write_tar(tmp_path / "train" / "1.tar", pair("good", 1))
    (tmp_path / "train" / "sizes.json").write_text(json.dumps({"0.tar": 1, "1.tar": 1}))
    index = load_index([str(tmp_path / "train")])
    batches = take(index, 4, micro_batch=1)
    assert set(keys_of(batches)) == {"train/1.tar::good"}
    reasons = {reason for batch in batches for _, reason in batch.skipped}
    assert reasons == {"no .json or .txt member with this key"}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_evaluation_counts_every_clip_once(tmp_path, world_size, workers):
    members = [m for n in range(7) for m in pair(f"s{n:04d}", n, text=[f"first {n}", f"second {n}"])]
    write_tar(tmp_path / "test" / "0.tar", members)
    index = load_index([str(tmp_path / "test")])
    ranks = [
        list(eval_batches(index, plan=plan(rank=rank, world_size=world_size, micro_batch=2, workers=workers)))
        for rank in range(world_size)
    ]
    assert {len(batches) for batches in ranks} == {-(-7 // (2 * world_size))}
    clips, captions = [], []
    for batch in itertools.chain(*ranks):
        assert len(batch) == 2 and len(batch.captions) == 4
        clips += batch.clip_ids[batch.valid].tolist()
        captions += [
            (clip, text)
            for clip, text, valid in zip(
                batch.caption_clip_ids.tolist(), batch.captions, batch.caption_valid.tolist(), strict=True
            )
            if valid
        ]
        assert batch.caption_ids.tolist() == [caption_id(text) for text in batch.captions]
    assert sorted(clips) == list(range(7))
    assert sorted(captions) == sorted((n, f"{place} {n}") for n in range(7) for place in ("first", "second"))


@pytest.mark.parametrize("world_size", [1, 3])
def test_evaluation_in_larger_batches_than_there_are_clips_reads_none_in_vain(tmp_path, world_size):
    write_tar(tmp_path / "test" / "0.tar", [m for n in range(6) for m in pair(f"s{n:04d}", n)])
    index = load_index([str(tmp_path / "test")])
    for rank in range(world_size):
        (batch,) = eval_batches(index, plan=plan(rank=rank, world_size=world_size, micro_batch=10**12))
        assert len(batch) == 6 // world_size and batch.valid.all()


def test_evaluation_is_the_same_each_time_and_marks_what_fills_in(tmp_path):
    features = FeatureConfig("rand_trunc", max_samples=48_000)
    members = [m for n in range(4) for m in pair(f"s{n:04d}", n, seconds=2.0)] + [("x.flac", b"junk"), ("x.txt", b"x")]
    write_tar(tmp_path / "test" / "0.tar", members)
    index = load_index([str(tmp_path / "test")])
    passes = [list(eval_batches(index, plan=plan(micro_batch=2, features=features, seed=seed))) for seed in (0, 0, 5)]
    for other in passes[1:]:
        for a, b in zip(passes[0][:2], other[:2], strict=True):
            assert (a.clips.samples == b.clips.samples).all()
    last = passes[0][-1]
    assert last.clip_ids.tolist() == [4, 0] and last.valid.tolist() == [False, False]
    assert last.skipped == [("test/0.tar::x", last.skipped[0][1])]
    assert sum(int(batch.valid.sum()) for batch in passes[0]) == 4


def test_a_batch_moves_without_losing_anything(index):
    (batch,) = take(index, 1)
    moved = batch.to("cpu")
    assert moved.keys == batch.keys and (moved.input_ids == batch.input_ids).all()
