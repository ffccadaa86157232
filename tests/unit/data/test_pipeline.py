from __future__ import annotations

import hashlib
import itertools
from collections import deque

import numpy as np
import pytest
import torch

from clap_zero.audio.clips import FeatureConfig
from clap_zero.audio.decode import load_clip
from clap_zero.audio.features import ClapFeatures
from clap_zero.audio.logmel import encode_logmel
from clap_zero.audio.pcm import load_pcm
from clap_zero.config.data import DataSetSection
from clap_zero.data.index import load_index
from clap_zero.data.loader import Batch, eval_batches, train_batches
from clap_zero.data.shards import ShardReader
from clap_zero.data.stopwatch import STAGES
from clap_zero.errors import DataError
from tests.unit.data.shard_files import audio_bytes, pair, write_split, write_tar
from tests.unit.data.taking import FUSION, RAND, keys_of, plan, take


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    return load_index([str(write_split(tmp_path_factory.mktemp("data") / "train", [10, 6, 8]))])


def test_blacklisted_samples_are_left_out_of_training_only(tmp_path):
    members = [m for n in range(20) for m in pair(f"s{n:04d}", n)]
    write_tar(tmp_path / "train" / "0.tar", members)
    index = load_index([str(tmp_path / "train")])
    names = tmp_path / "names.txt"
    mark = hashlib.sha256(audio_bytes(7)).hexdigest()
    names.write_text("s0003\ntrain/0.tar::s0005\nsha256:" + mark + "\n")
    out = {f"train/0.tar::{name}" for name in ("s0003", "s0005", "s0007")}
    for workers in (0, 2):
        batches = take(index, 5, blacklist=(str(names),), max_bad_fraction=0.0, workers=workers)
        assert {entry for batch in batches for entry in batch.skipped} == {(key, "blacklisted") for key in out}
        assert set(keys_of(batches)) == set(keys_of(take(index, 5))) - out
    evaluated = list(eval_batches(index, plan=plan(blacklist=(str(names),))))
    assert out <= set(keys_of(evaluated)) and not any(batch.skipped for batch in evaluated)
    with pytest.raises(DataError, match="data.blacklist"):
        take(index, 1, blacklist=(str(tmp_path / "nowhere"),))


def test_each_set_has_its_own_captions(tmp_path):
    write_tar(tmp_path / "a" / "0.tar", [m for n in range(6) for m in pair(f"a{n}", n)])
    tagged = [
        m for n in range(6) for m in ((f"b{n}.flac", audio_bytes(50 + n)), (f"b{n}.json", b'{"kind": ["x", "y"]}'))
    ]
    write_tar(tmp_path / "b" / "0.tar", tagged)
    sets = [
        DataSetSection(shards=str(tmp_path / "a"), caption_templates=("<{caption}>",)),
        DataSetSection(shards=str(tmp_path / "b"), tags="missing", tag_key="kind", tag_template="{tags}!"),
    ]
    index = load_index(sets)
    for batch in eval_batches(index, plan=plan()):
        for key, set_id, caption in zip(batch.keys, batch.set_ids.tolist(), batch.captions, strict=True):
            name = key.partition("::")[2]
            assert (caption, set_id) == (("x, y!", 1) if name[0] == "b" else (f"<caption of {name}>", 0))
    seen = [batch.set_ids for batch in take(index, 3, workers=1)]
    assert torch.cat(seen).bincount().tolist() == [6, 6]


def test_stored_mels_and_recordings_may_be_mixed(tmp_path):
    features = ClapFeatures(RAND, device="cpu")
    clips = [audio_bytes(n, seconds=2.0) for n in range(4)]
    stored = [encode_logmel(load_clip(clip, max_seconds=60), features) for clip in clips]
    for name, first in (("audio", 4), ("mixed", 2)):
        members = [m for n in range(4) for m in ((f"{n}.flac", clips[n]), (f"{n}.txt", b"x")) if n < first]
        members += [m for n in range(first, 4) for m in ((f"{n}.logmel", stored[n]), (f"{n}.txt", b"x"))]
        write_tar(tmp_path / name / "0.tar", members)
    made = []
    for name in ("audio", "mixed"):
        for workers in (0, 1):
            (batch,) = take(load_index([str(tmp_path / name)]), 1, workers=workers)
            mels, _ = features(batch.clips)
            made.append(dict(zip((key[-1] for key in batch.keys), mels, strict=True)))
    for other in made[1:]:
        assert all((made[0][key] - other[key]).abs().max() < 0.01 for key in "0123")


def test_a_stored_mel_for_other_features_is_a_bad_sample(tmp_path):
    stored = encode_logmel(load_clip(audio_bytes(0), max_seconds=60), ClapFeatures(RAND, device="cpu"))
    members = [m for n in range(4) for m in pair(f"s{n}", n)] + [("x.logmel", stored), ("x.txt", b"x")]
    write_tar(tmp_path / "train" / "0.tar", members)
    batches = take(load_index([str(tmp_path / "train")]), 5, micro_batch=1, features=FUSION)
    ((key, reason),) = [entry for batch in batches for entry in batch.skipped]
    assert key == "train/0.tar::x" and "--truncation fusion" in reason


def test_time_is_told_by_stage(index):
    for workers in (0, 1):
        for batch in take(index, 3, workers=workers):
            assert tuple(batch.seconds) == STAGES
            assert all(batch.seconds[stage] > 0 for stage in ("read", "decode", "captions", "tokenise", "collate"))
            assert batch.seconds["download"] == batch.seconds["resample"] == 0
    (batch,) = take(index, 1, features=FeatureConfig("rand_trunc", sample_rate_hz=32_000, max_samples=320_000))
    assert batch.seconds["resample"] > 0


def test_what_a_decoder_raises_is_a_bad_sample_and_what_we_raise_says_where(index, monkeypatch):
    def odd(data, **_):
        raise ValueError("odd\nbytes")

    monkeypatch.setattr("clap_zero.data.pipeline.load_pcm", odd)
    with pytest.raises(DataError, match=r"rank 0: 0 usable .*ValueError in DecodeClip: odd \(64\)"):
        take(index, 1)

    def wrong(data, **_):
        raise AssertionError("ours")

    monkeypatch.setattr("clap_zero.data.pipeline.load_pcm", wrong)
    with pytest.raises(DataError, match=r"rank 0: .*/train/\d\.tar, sample train/\d\.tar::s\d+: .*ours"):
        take(index, 1)


def test_what_a_reader_raises_says_where(index, monkeypatch):
    def stop(self, shard, sample_id):
        raise DataError(f"{shard.path} is gone")

    monkeypatch.setattr(ShardReader, "read", stop)
    with pytest.raises(DataError, match=r"rank 0: .*/train/\d\.tar is gone \(at sample train/\d\.tar::#\d+\)"):
        take(index, 1)


def test_remote_samples_are_asked_for_before_they_are_read(index, monkeypatch):
    calls: list[tuple[str, str, int]] = []

    def read(self, shard, sample_id):
        calls.append(("read", shard.path, sample_id))
        return original(self, shard, sample_id)

    original = ShardReader.read
    monkeypatch.setattr("clap_zero.data.slots.is_remote", lambda path: True)
    monkeypatch.setattr("clap_zero.data.slots.LOOK_AHEAD", 8)
    monkeypatch.setattr(ShardReader, "prefetch", lambda self, shard, n: calls.append(("ask", shard.path, n)))
    monkeypatch.setattr(ShardReader, "read", read)
    take(index, 6)
    reads = [number for number, call in enumerate(calls) if call[0] == "read"]
    for number in reads:
        asked = calls.index(("ask", *calls[number][1:]))
        between = sum(1 for read_number in reads if asked < read_number < number)
        assert asked < number and (between >= 4 or number < reads[8])


@pytest.mark.parametrize(("workers", "num_kept"), [(0, 3), (3, 1), (2, 3)])
def test_the_memory_of_clips_is_used_again_and_never_while_it_is_read(tmp_path, workers, num_kept):
    """Batches stay what they were when later ones are made, bad samples in between included."""
    members = [m for n in range(20) for m in pair(f"s{n:04d}", n, seconds=1.0)]
    members += [("bad.flac", audio_bytes(77)), ("bad.json", b'{"text": []}')]
    write_tar(tmp_path / "train" / "0.tar", members)
    expected = [load_pcm(audio_bytes(n, seconds=1.0), max_seconds=60) for n in range(20)]
    batches = train_batches(load_index([str(tmp_path / "train")]), plan=plan(micro_batch=3, workers=workers))
    latest: deque[Batch] = deque(maxlen=num_kept)
    for batch in itertools.islice(batches, 60):
        latest.append(batch)
        del batch  # the memory of the first is free as soon as it is out of `latest`
        for kept in latest:
            for key, part in zip(kept.keys, kept.clips.samples.split(kept.clips.lengths.tolist()), strict=True):
                np.testing.assert_array_equal(part.numpy(), expected[int(key[-4:])])
    batches.close()
