"""Stored log-mels: the same features as from FLAC, at hop resolution, and nothing worse than an AudioError."""

from __future__ import annotations

import functools
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clap_zero.audio.decode import load_clip
from clap_zero.audio.features import ClapFeatures, ClipBatch, FeatureConfig, plan_crop
from clap_zero.audio.kinds import AudioError
from clap_zero.audio.logmel import decode_logmel, encode_logmel, is_logmel, to_pcm16
from clap_zero.audio.waveform import to_int16
from tests.unit.audio.sounds import encode, noise, real_clips, tone

MODES = ("rand_trunc", "fusion")
LIMIT_DB = 0.01
HEADER_BYTES = 64


@functools.cache
def features(mode: str, dtype: torch.dtype = torch.float32) -> ClapFeatures:
    return ClapFeatures(FeatureConfig(mode), device="cpu", dtype=dtype)


def from_flac(clip: np.ndarray) -> np.ndarray:
    """What training sees of a clip that was stored as 16-bit FLAC."""
    return to_int16(load_clip(encode(to_pcm16(clip), "FLAC", subtype="PCM_16"), max_seconds=1000))


def sounds() -> dict[str, np.ndarray]:
    real = real_clips((14_400, 300_000, 480_000, 480_240, 1_000_000, 1_900_000))
    return {f"real {clip.size}": clip for clip in real} | {
        "noise": noise(10),
        "long noise": noise(23.4),
        "tone": tone(10),
        "long tone": tone(31, hz=440),
        "silence": np.zeros(480_000, np.float32),
        "long silence": np.zeros(700_000, np.float32),
        "full scale": np.sign(tone(10)),
        "over full scale": 8 * noise(12),
        "one LSB": tone(4, peak=1.01 / 32768),
        "one sample": np.ones(1, np.float32),
    }


@pytest.mark.parametrize("mode", MODES)
def test_whole_clips_and_fusion_equal_the_exact_features_on_every_cell(mode):
    cfg, exact = FeatureConfig(mode), features(mode, torch.float64)
    for name, clip in sounds().items():
        if mode == "rand_trunc" and clip.size > cfg.max_samples:
            continue
        seen = from_flac(clip)
        stored = decode_logmel(encode_logmel(clip, features(mode)), cfg)
        frames, starts = stored.part(cfg, np.random.default_rng(5))
        plan = plan_crop(seen.size, cfg, np.random.default_rng(5))
        assert starts == plan.chunk_starts and stored.num_samples == clip.size, name
        ours, longer = features(mode)(ClipBatch.from_parts([frames], [starts]))
        theirs, theirs_longer = exact(ClipBatch.from_parts([seen], [starts]))
        assert torch.equal(longer, theirs_longer), name
        assert (ours - theirs).abs().max() <= LIMIT_DB, name


def test_crops_equal_those_of_the_waveform_but_for_two_frames_at_either_edge():
    cfg, exact = FeatureConfig("rand_trunc"), features("rand_trunc", torch.float64)
    for name, clip in sounds().items():
        if clip.size <= cfg.max_samples:
            continue
        seen, stored = from_flac(clip), decode_logmel(encode_logmel(clip, features("rand_trunc")), cfg)
        for seed in (None, 0, 1):
            rngs = [None if seed is None else np.random.default_rng(seed) for _ in range(2)]
            frames, starts = stored.part(cfg, rngs[0])
            drawn = plan_crop(seen.size, cfg, rngs[1]).start_sample
            start = drawn // cfg.hop * cfg.hop  # less than a hop before the crop of the waveform
            ours, _ = features("rand_trunc")(ClipBatch.from_parts([frames], [starts]))
            theirs, _ = exact(ClipBatch.from_parts([seen[start : start + cfg.max_samples]], [starts]))
            error_db = (ours - theirs).abs()[0, 0]
            assert error_db[2:-2].max() <= LIMIT_DB, name
            # The others have the sound beyond the edge instead of its mirror image: those of the whole clip.
            whole, _ = features("fusion")(ClipBatch.from_parts([seen], [(0, 0, 0)]))
            assert frames.shape == (1001, 64) and whole.shape[2] == 1001
            row = torch.empty(cfg.num_frames(seen.size), 64, dtype=torch.float64)
            exact._log_mel.of_wave(torch.from_numpy(seen), out=row, block_frames=500)
            first = start // cfg.hop
            assert (ours[0, 0] - row[first : first + 1001]).abs().max() <= LIMIT_DB, name


def test_the_start_of_a_stored_crop_covers_the_whole_clip():
    cfg = FeatureConfig("rand_trunc")
    stored = decode_logmel(encode_logmel(noise(10.05), features("rand_trunc")), cfg)
    rng = np.random.default_rng(0)
    firsts = set()
    for _ in range(200):
        frames, _ = stored.part(cfg, rng)
        firsts.add((frames.__array_interface__["data"][0] - stored.frames.__array_interface__["data"][0]) // 128)
    assert {0, 1, 2, 3, 4} <= firsts <= {0, 1, 2, 3, 4, 5}  # the last only for the very last of 2,401 starts


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", [None, 3])
def test_the_longest_part_is_drawn_as_the_decoder_draws_it(mode, seed):
    cfg, clip = FeatureConfig(mode), noise(31)
    rngs = [None if seed is None else np.random.default_rng(seed) for _ in range(2)]
    waveform = load_clip(encode(to_pcm16(clip), "WAV"), max_seconds=20, rng=rngs[0])
    plan = plan_crop(waveform.size, cfg, rngs[0])
    stored = decode_logmel(encode_logmel(clip, features(mode)), cfg)
    frames, starts = stored.part(cfg, rngs[1], max_seconds=20)
    assert starts == plan.chunk_starts and frames.shape[0] == cfg.num_frames(plan.num_samples)
    if seed is not None:
        first = (frames.__array_interface__["data"][0] - stored.frames.__array_interface__["data"][0]) // 128
        pcm = to_pcm16(clip) / np.float32(32768)
        at = next(i for i in np.flatnonzero(pcm == waveform[0]) if np.array_equal(waveform[:50], pcm[i : i + 50]))
        assert first in ((at + plan.start_sample) // 480, (at + plan.start_sample) // 480 - 1)


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_mixes_waveforms_and_stored_mels(mode):
    cfg = FeatureConfig(mode)
    parts, starts, expected = [], [], []
    for i, seconds in enumerate((3, 25, 10, 12, 0.2, 40, 10.005)):
        clip = noise(seconds, seed=i)
        plan = plan_crop(clip.size, cfg, None)
        frames, chunk_starts = decode_logmel(encode_logmel(clip, features(mode)), cfg).part(cfg, None)
        seen = from_flac(clip)[plan.start_sample : plan.start_sample + plan.num_samples]
        parts += [seen, frames] if i % 2 else [frames, seen]
        starts += [plan.chunk_starts, chunk_starts]
        expected += [(seen, False), (frames, True)] if not i % 2 else [(seen, True), (frames, False)]
    batch = ClipBatch.from_parts(parts, starts)
    assert len(batch) == 14 and batch.samples.dtype == batch.mels.dtype == torch.int16
    together, longer = features(mode)(batch)
    assert longer[:, 0].tolist() == [
        mode == "fusion" and s in (25, 12, 40) for s in (3, 25, 10, 12, 0.2, 40, 10.005) for _ in "ab"
    ]
    for i, part in enumerate(parts):
        alone, is_longer = features(mode)(ClipBatch.from_parts([part], [starts[i]]))
        assert torch.equal(alone[0], together[i]) and torch.equal(is_longer[0], longer[i])
    moved = batch.to("meta")
    assert moved.samples.is_meta and moved.mels.is_meta and not moved.is_mel.is_meta and not moved.lengths.is_meta


def test_the_header_is_as_documented():
    data = encode_logmel(noise(12), features("rand_trunc"))
    assert len(data) == HEADER_BYTES + 1201 * 64 * 2 and is_logmel(data) and not is_logmel(b"fLaC" + data)
    assert data[:9] == b"CLAPMEL\x01\x01"
    assert struct.unpack_from("<5I2dQ2I", data, 12) == (
        *(48_000, 1024, 480, 64, 480_000, 50.0, 14_000.0, 576_000, 1201),
        zlib.crc32(data[64:], zlib.crc32(data[:60])),
    )


@pytest.mark.parametrize(
    ("cfg", "named"),
    [
        (FeatureConfig("fusion"), "mel_scale slaney for htk.*--truncation fusion"),
        (FeatureConfig("rand_trunc", f_min=0.0), "f_min 50 for 0.0"),
        (FeatureConfig("rand_trunc", max_samples=240_000), "max_samples 480000 for 240000"),
        (FeatureConfig("rand_trunc", num_mels=80), "num_mels 64 for 80"),
    ],
)
def test_mels_for_another_model_are_refused_with_the_way_out(cfg, named):
    with pytest.raises(AudioError, match=named):
        decode_logmel(encode_logmel(noise(1), features("rand_trunc")), cfg)


def test_small_feature_sizes_are_stored_too():
    cfg = FeatureConfig("fusion", max_samples=48_000, num_mels=40, n_fft=512, hop=256)
    small = ClapFeatures(cfg, device="cpu")
    clip = noise(2.5)
    frames, starts = decode_logmel(encode_logmel(clip, small), cfg).part(cfg, None)
    ours, longer = small(ClipBatch.from_parts([frames], [starts]))
    theirs, _ = small(ClipBatch.from_parts([from_flac(clip)], [starts]))
    assert longer.all() and (ours - theirs).abs().max() <= LIMIT_DB


CFG = FeatureConfig("fusion")


@functools.cache
def good_bytes() -> bytes:
    return encode_logmel(noise(10.1), features("fusion"))


def refused(data: bytes) -> None:
    with pytest.raises(AudioError):
        decode_logmel(data, CFG)


@given(st.data())
def test_damaged_bytes_are_refused_in_one_line(data):
    good = bytearray(good_bytes())
    kind = data.draw(st.sampled_from(("flip", "cut", "append", "header")))
    if kind == "flip":
        at = data.draw(st.one_of(st.integers(0, HEADER_BYTES), st.integers(0, len(good) - 1)))
        good[at] ^= data.draw(st.integers(1, 255))
    elif kind == "cut":
        del good[data.draw(st.integers(0, len(good) - 1)) :]
    elif kind == "append":
        good += data.draw(st.binary(min_size=1, max_size=40))
    else:
        junk = data.draw(st.binary(min_size=HEADER_BYTES - 9, max_size=HEADER_BYTES - 9))
        good[9:HEADER_BYTES] = junk
    if bytes(good) != good_bytes():
        with pytest.raises(AudioError) as error:
            decode_logmel(bytes(good), CFG)
        assert "\n" not in error.value.reason


def test_a_header_that_claims_terabytes_costs_nothing():
    good = good_bytes()
    tracemalloc.start()
    for num_samples in (0, 2**40, 2**63, 2**64 - 1):
        for num_frames in (0, 2**31, 2**32 - 1, (num_samples // 480 + 1) % 2**32):
            head = good[:48] + struct.pack("<QI", num_samples, num_frames)
            refused(head + struct.pack("<I", zlib.crc32(good[64:], zlib.crc32(head))) + good[64:])
    assert tracemalloc.get_traced_memory()[1] < 2_000_000
    tracemalloc.stop()
    refused(b"")
    refused(b"CLAPMEL")
    refused(b"CLAPMEL\x02" + good[8:])


def test_the_frames_are_a_view_of_the_bytes():
    data = good_bytes()
    frames = decode_logmel(data, CFG).frames
    assert not frames.flags.owndata and not frames.flags.writeable and frames.nbytes == len(data) - HEADER_BYTES
