"""Damaged bytes for each reader by itself: a result, or the error that says why not, in bounded time; nothing else."""

from __future__ import annotations

import contextlib
import json
import random
import time

import numpy as np
import pytest

from clap_zero.audio.clips import FeatureConfig
from clap_zero.audio.decode import AudioError
from clap_zero.audio.features import ClapFeatures
from clap_zero.audio.logmel import decode_logmel, encode_logmel
from clap_zero.audio.pcm import load_pcm
from clap_zero.data.captions import CaptionRule, all_captions
from clap_zero.data.index import load_index
from clap_zero.data.members import BadSampleError
from clap_zero.data.samples import sample_in
from clap_zero.data.shards import ShardReader
from clap_zero.data.spans import SpansError
from clap_zero.data.text import Tokenizer
from clap_zero.errors import DataError
from tests.distributed.fuzz_shards import ANY_BYTES, AUDIO_DAMAGE, Owner, head_fields, make_tar
from tests.unit.audio.sounds import encode, noise
from tests.unit.data.shard_files import write_split
from tests.unit.data.span_files import write_spans

KINDS = (
    ("FLAC", "PCM_16"), ("FLAC", "PCM_24"), ("WAV", "PCM_16"), ("WAV", "PCM_U8"), ("WAV", "ULAW"), ("WAV", "ALAW"),
    ("WAV", "IMA_ADPCM"), ("WAV", "MS_ADPCM"), ("WAV", "GSM610"), ("WAV", "FLOAT"), ("WAVEX", "PCM_24"),
    ("RF64", "PCM_16"), ("AIFF", "PCM_16"), ("CAF", "PCM_16"), ("CAF", "ALAC_16"), ("W64", "PCM_16"), ("AU", "PCM_16"),
    ("OGG", "VORBIS"), ("OGG", "OPUS"), ("MP3", None),
)  # fmt: skip
SAMPLE_LIMIT_S = 5.0


@pytest.mark.parametrize(("kind", "subtype"), KINDS)
def test_audio(kind, subtype, capfd):
    rng = random.Random(f"{kind} {subtype}")
    files = [encode(noise(seconds), kind, subtype=subtype) for seconds in (0.05, 11)]
    if subtype != "GSM610":  # mono only
        files.append(encode(np.stack([noise(1)] * 2, axis=1), kind, subtype=subtype))
    for number in range(40):
        data = rng.choice(files)
        for _ in range(rng.choice((1, 1, 2, 3))):
            data = rng.choice(AUDIO_DAMAGE)(data, rng)
        draws = np.random.default_rng(number) if rng.random() < 0.5 else None
        begun = time.process_time()
        with contextlib.suppress(AudioError):
            assert 1 <= load_pcm(data, max_seconds=10.0, rng=draws).size <= 480_000
        assert time.process_time() - begun < SAMPLE_LIMIT_S
    assert "Traceback" not in capfd.readouterr().err


def test_stored_log_mels():
    rng, config = random.Random(0), FeatureConfig("fusion")
    features = ClapFeatures(config, device="cpu")
    for data in [encode_logmel(noise(seconds), features) for seconds in (0.1, 12)]:
        for _ in range(100):
            with pytest.raises(AudioError):  # a checksum leaves no chance
                changed = rng.choice(AUDIO_DAMAGE)(data, rng)
                decode_logmel(changed if changed != data else data[:-1], config)


def test_captions():
    rng, tokenizer = random.Random(0), Tokenizer()
    texts = [
        json.dumps({"text": ["a dog", "b"], "tag": ["x", "y"], "original_data": {"ytid": "abc"}}).encode(),
        "naïve 音".encode(), b"[1, 2]", b'{"text": {"a": 1}, "tag": "q"}', b'{"text": null, "tag": [null, 3, "z"]}',
    ]  # fmt: skip
    rules = [CaptionRule(tags=tags) for tags in ("never", "missing", "always")]
    for _ in range(1500):
        suffixes = rng.choice(((".json",), (".txt",), (".json", ".txt")))
        damaged = {suffix: rng.choice(ANY_BYTES)(rng.choice(texts), rng) for suffix in suffixes}
        with contextlib.suppress(BadSampleError):
            captions = all_captions(damaged, rng.choice(rules))
            assert captions and all(caption.text.strip() for caption in captions)
            assert all(2 < len(tokenizer.encode(caption.text, 77)) <= 77 for caption in captions)


def test_byte_ranges():
    rng = random.Random(0)
    for number in range(300):
        owner = Owner(number % 7, f"key{number % 5}")
        data = make_tar(owner.members()).rstrip(b"\0")
        with contextlib.suppress(SpansError, BadSampleError):
            assert sample_in(rng.choice(ANY_BYTES)(data, rng)).audio


@pytest.mark.parametrize("name", ["sizes.json", "spans.npy", "0.tar"])
def test_a_split(tmp_path, name):
    rng = random.Random(name)
    split = write_split(tmp_path / "train", [3, 3])
    write_spans(split)
    good = (split / name).read_bytes()
    for _ in range(60):
        (split / name).write_bytes(rng.choice((head_fields, *ANY_BYTES))(good, rng))
        with contextlib.suppress(DataError):
            index, reader = load_index([str(split)]), ShardReader()
            for number in range(index.num_shards):
                shard = index.shard(number)
                for sample_id in range(min(shard.num_samples, 4)):
                    with contextlib.suppress(BadSampleError):
                        assert reader.read(shard, sample_id).texts
            reader.close()
