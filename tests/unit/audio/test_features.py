"""Log-mel features against Hugging Face's ClapFeatureExtractor."""

from __future__ import annotations

import copy
import functools
import pickle
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import numpy as np
import pytest
import torch

from clap_zero.audio.features import ClapFeatures, ClipBatch, FeatureConfig, plan_crop, shrink_in_time
from clap_zero.audio.mel import mel_filters
from clap_zero.audio.waveform import from_int16, to_int16
from tests.unit.audio.sounds import noise, real_clips, tone

SECONDS = (0.1, 0.3, 0.5, 0.9, 1.3, 2, 3, 4, 5, 6, 7.5, 9.999, 10, 10.005, 10.02, 12, 15, 20, 30, 40)
MODES = ("rand_trunc", "fusion")


@functools.cache
def extractor(mode: str):
    from transformers import ClapFeatureExtractor

    return ClapFeatureExtractor(frequency_min=50, frequency_max=14_000, truncation=mode)


def reference(clip: np.ndarray, starts, mode: str) -> tuple[np.ndarray, bool]:
    """What the extractor gives for a part that is cut already, with its three draws replaced by `starts`."""
    draws = iter(starts)
    with mock.patch("numpy.random.choice", lambda _: next(draws)):
        return extractor(mode)._get_input_mel(clip.astype(np.float64), 480_000, mode, "repeatpad")


@functools.cache
def real_cases(mode: str):
    """Twenty real clips of 0.1 to 40 s, cut as training would, and what the extractor makes of them."""
    cfg, rng = FeatureConfig(mode), np.random.default_rng(3)
    parts, starts = [], []
    for clip in real_clips(tuple(round(s * 48_000) for s in SECONDS)):
        plan = plan_crop(clip.size, cfg, rng)
        parts.append(clip[plan.start_sample : plan.start_sample + plan.num_samples])
        starts.append(plan.chunk_starts)
    return parts, starts, [reference(part, start, mode) for part, start in zip(parts, starts, strict=True)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_real_clips_agree_with_the_extractor(mode, dtype):
    parts, starts, expected = real_cases(mode)
    features, is_longer = ClapFeatures(FeatureConfig(mode), device="cpu", dtype=dtype)(
        ClipBatch.from_parts(parts, starts)
    )
    assert features.shape == (20, 4 if mode == "fusion" else 1, 1001, 64)
    assert features.dtype == torch.float32 and is_longer.shape == (20, 1)
    assert is_longer[:, 0].tolist() == [longer for _, longer in expected]
    for seconds, ours, (theirs, _) in zip(SECONDS, features.numpy(), expected, strict=True):
        error_db = np.abs(ours - theirs)
        if dtype == torch.float64:
            assert error_db.max() <= 1e-4, seconds
        else:
            assert np.quantile(error_db, 0.99) <= 1e-3 and error_db.max() <= 0.05, seconds


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_pure_tone_is_right_in_its_quiet_cells_too(dtype):
    clip = tone(10)
    ours = ClapFeatures(FeatureConfig("fusion"), device="cpu", dtype=dtype)(ClipBatch.from_parts([clip], [(0, 0, 0)]))
    assert np.abs(ours[0][0].numpy() - reference(clip, (0, 0, 0), "fusion")[0]).max() <= 1e-3


@pytest.mark.parametrize("mode", MODES)
def test_the_extractor_itself_agrees_end_to_end(mode):
    # Through its public call, with the draws that its own random state makes.
    clip = noise(10.5)
    np.random.seed(7)
    theirs = extractor(mode)(clip, sampling_rate=48_000, return_tensors="np")["input_features"][0]
    np.random.seed(7)
    if mode == "rand_trunc":
        start = np.random.randint(0, clip.size - 480_000 + 1)
        batch = ClipBatch.from_parts([clip[start : start + 480_000]], [(0, 0, 0)])
    else:
        starts = [np.random.choice(third) for third in np.array_split(list(range(51)), 3)]
        batch = ClipBatch.from_parts([clip], [starts])
    ours, _ = ClapFeatures(FeatureConfig(mode), device="cpu")(batch)
    assert np.abs(ours[0].numpy() - theirs).max() <= 1e-3


@pytest.mark.parametrize("num_samples", [480_000, 480_001, 480_479, 480_480, 480_960])
def test_clips_a_little_longer_than_ten_seconds(num_samples):
    # Up to a hop more there are as many frames as in a chunk: the extractor stacks the whole mel and calls it short.
    cfg, clip = FeatureConfig("fusion"), noise(11)[:num_samples]
    plan = plan_crop(clip.size, cfg, None)
    theirs, longer = reference(clip, plan.chunk_starts, "fusion")
    ours, is_longer = ClapFeatures(cfg, device="cpu")(ClipBatch.from_parts([clip], [plan.chunk_starts]))
    assert is_longer.tolist() == [[longer]] == [[num_samples >= 480_480]]
    assert np.abs(ours[0].numpy() - theirs).max() <= 1e-3


@pytest.mark.parametrize("block_frames", [1001, 2002])
def test_no_transform_takes_more_than_a_block(block_frames, monkeypatch):
    """Short clips in groups, and long ones by their frames: as on a device, with a smaller block."""
    cfg = FeatureConfig("fusion")
    batch = ClipBatch.from_clips([noise(seconds, seed=i) for i, seconds in enumerate((5, 2, 45, 10, 8))], cfg)
    features = ClapFeatures(cfg, device="cpu")
    expected, _ = features(batch)
    sizes, original = [], torch.fft.rfft

    def transform(frames):
        sizes.append(frames.shape[0])
        return original(frames)

    monkeypatch.setattr(torch.fft, "rfft", transform)
    features._grouped, features._block_frames = True, block_frames
    assert (features(batch)[0] - expected).abs().max() < 1e-4
    assert 4 * 1001 + 4501 <= sum(sizes) <= 4 * 1001 + 4510 and max(sizes) <= block_frames
    assert (2002 in sizes) == (block_frames == 2002)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("as_int16", [True, False])
def test_a_clip_does_not_depend_on_its_batch(mode, as_int16):
    cfg = FeatureConfig(mode)
    clips = [noise(seconds, seed=i) for i, seconds in enumerate((5, 12, 0.4, 10, 31, 9.999, 10.005, 2))]
    features = ClapFeatures(cfg, device="cpu")
    together, longer = features(ClipBatch.from_clips(clips, cfg, as_int16=as_int16))
    for i, clip in enumerate(clips):
        for _ in range(2):
            alone, is_longer = features(ClipBatch.from_clips([clip], cfg, as_int16=as_int16))
            assert torch.equal(alone[0], together[i]) and torch.equal(is_longer[0], longer[i])
    backwards, _ = features(ClipBatch.from_clips(clips[::-1], cfg, as_int16=as_int16))
    assert torch.equal(backwards.flip(0), together)


def test_sixteen_bit_clips_mean_their_float_samples():
    cfg = FeatureConfig("fusion")
    pcm = to_int16(noise(3))
    for dtype in (torch.float32, torch.float64):
        features = ClapFeatures(cfg, device="cpu", dtype=dtype)
        assert torch.equal(
            features(ClipBatch.from_parts([pcm], [(0, 0, 0)]))[0],
            features(ClipBatch.from_parts([from_int16(pcm)], [(0, 0, 0)]))[0],
        )


@pytest.mark.parametrize("mode", MODES)
def test_silence_is_the_floor_and_never_nan(mode):
    # A full micro batch of digital silence.
    cfg = FeatureConfig(mode)
    clips = [np.zeros(n, dtype=np.float32) for n in (480_000, 1, 700_000, 48_000)]
    ours, _ = ClapFeatures(cfg, device="cpu")(ClipBatch.from_clips(clips, cfg))
    assert torch.equal(ours, torch.full_like(ours, -100.0))
    for dtype in (torch.float16, torch.bfloat16):
        assert torch.isfinite(ours.to(dtype)).all()


@pytest.mark.parametrize("num_samples", [1, 480, 43_200, 479_952])
@pytest.mark.parametrize("mode", MODES)
def test_very_short_clips_are_repeat_padded(num_samples, mode):
    # 1 sample, 10 ms, 0.9 s, 9.999 s.
    cfg, clip = FeatureConfig(mode), noise(10)[:num_samples]
    ours, is_longer = ClapFeatures(cfg, device="cpu")(ClipBatch.from_parts([clip], [(0, 0, 0)]))
    theirs, _ = reference(clip, (0, 0, 0), mode)
    assert ours.shape == (1, cfg.num_mel_images, 1001, 64) and not is_longer.any()
    assert np.abs(ours[0].numpy() - theirs).max() <= 1e-3


def test_precision_switches_of_the_program_change_nothing():
    cfg = FeatureConfig("fusion")
    batch = ClipBatch.from_clips([noise(12)], cfg)
    features = ClapFeatures(cfg, device="cpu")
    expected, _ = features(batch)
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(features(batch)[0], expected)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_threads_share_one_object_and_copies_travel():
    cfg = FeatureConfig("fusion")
    batches = [ClipBatch.from_clips([noise(seconds, seed=i)], cfg) for i, seconds in enumerate((3, 12, 10, 25))]
    features = ClapFeatures(cfg, device="cpu")
    expected = [features(batch)[0] for batch in batches]
    torch.set_float32_matmul_precision("medium")
    try:
        with ThreadPoolExecutor(4) as pool:
            for _ in range(3):
                found = list(pool.map(lambda batch: features(batch)[0], batches))
                assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    for copied in (copy.deepcopy(features), pickle.loads(pickle.dumps(features))):
        assert torch.equal(copied(batches[1])[0], expected[1])


@pytest.mark.parametrize("num_frames", [1002, 1003, 1500, 1601, 2777, 3001, 5999, 6001])
def test_shrinking_is_bilinear_interpolation(num_frames):
    mel = torch.randn(num_frames, 64, generator=torch.Generator().manual_seed(0)) * 30
    theirs = torch.nn.functional.interpolate(mel[None, None], size=(1001, 64), mode="bilinear", align_corners=False)
    assert (shrink_in_time(mel, 1001) - theirs[0, 0]).abs().max() < 1e-4


def test_filters_are_the_extractors():
    sizes = {"n_fft": 1024, "num_mels": 64, "sample_rate_hz": 48_000, "f_min_hz": 50, "f_max_hz": 14_000}
    np.testing.assert_allclose(mel_filters(scale="htk", **sizes), extractor("fusion").mel_filters, atol=1e-14)
    np.testing.assert_allclose(mel_filters(scale="slaney", **sizes), extractor("fusion").mel_filters_slaney, atol=1e-14)


def test_a_long_part_in_rand_trunc_is_our_bug():
    with pytest.raises(AssertionError, match="cut"):
        ClapFeatures(FeatureConfig("rand_trunc"), device="cpu")(ClipBatch.from_parts([noise(11)], [(0, 0, 0)]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mode", MODES)
def test_a_gpu_agrees_with_the_extractor(mode):
    parts, starts, expected = real_cases(mode)
    features, is_longer = ClapFeatures(FeatureConfig(mode), device="cuda")(ClipBatch.from_parts(parts, starts))
    assert is_longer[:, 0].tolist() == [longer for _, longer in expected]
    for ours, (theirs, _) in zip(features.cpu().numpy(), expected, strict=True):
        assert np.abs(ours - theirs).max() <= 1e-3
