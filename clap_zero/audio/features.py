"""Log-mel features of CLAP on any device, equal to Hugging Face's ClapFeatureExtractor."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from clap_zero.audio.clips import STORED_UNITS_PER_DB, ClipBatch, CropPlan, FeatureConfig, plan_crop
from clap_zero.audio.mel import mel_filters
from clap_zero.audio.waveform import INT16_SCALE

__all__ = ["ClapFeatures", "ClipBatch", "CropPlan", "FeatureConfig", "plan_crop"]

POWER_FLOOR = 1e-10
"""Smallest mel power before the logarithm: -100 dB is what digital silence gives."""


@contextlib.contextmanager
def _exact_float32(device: torch.device) -> Iterator[None]:
    """No TF32 or bf16 inside matrix products and no autocast, whatever the program around has chosen."""
    switches = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    before = [switch.fp32_precision for switch in switches]
    for switch in switches:
        switch.fp32_precision = "ieee"
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            yield
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.fp32_precision = value


class ClapFeatures:
    """Log-mel of batches of clips on a device.

    The steps are those of `ClapFeatureExtractor._np_extract_fbank_features`: reflect-padded frames, periodic Hann
    window, power spectrum, mel filters, 10 log10(max(x, 1e-10)), no top_db. The features of a clip do not depend on
    the other clips of its batch.

    The time goes into copies rather than arithmetic, so the frames go through in blocks, which on a CPU stay in the
    cache, and only the bins under the mel filters are squared. On other devices short clips go through in groups of a
    block's size, and a long clip takes no more memory than a group of short ones.
    """

    _CPU_BLOCK_FRAMES = 160  # 160 frames of 1024 float32 and their spectra are 1.3 MB
    _DEVICE_BLOCK_FRAMES = 16_016  # 16 clips of 10 s and their spectra are 0.3 GB

    def __init__(self, cfg: FeatureConfig, *, device: torch.device | str, dtype: torch.dtype = torch.float32) -> None:
        """Args:
        cfg: Features wanted.
        device: Where they are computed.
        dtype: Of waveforms, mel and logarithm: float32, or float64 as the reference. The Fourier transform runs in
            float64 either way where the device has it, and the results are float32.
        """
        assert dtype in (torch.float32, torch.float64), dtype
        self.cfg = cfg
        self.device = torch.device(device)
        self._block_frames = self._CPU_BLOCK_FRAMES if self.device.type == "cpu" else self._DEVICE_BLOCK_FRAMES
        self.dtype = dtype
        filters = mel_filters(
            scale=cfg.mel_scale,
            n_fft=cfg.n_fft,
            num_mels=cfg.num_mels,
            sample_rate_hz=cfg.sample_rate_hz,
            f_min_hz=cfg.f_min,
            f_max_hz=cfg.f_max,
        )
        used = np.nonzero(filters.sum(axis=1))[0]
        self._bins = slice(int(used[0]), int(used[-1]) + 1)
        # A float32 transform leaves noise of about 1e-7 of the loudest bin in all others: 0.1 dB in quiet cells of real
        # clips, 0.6 dB beside a pure tone. In float64 it takes 1.6 times as long. MPS has no float64.
        self._transform_dtype = torch.float32 if self.device.type == "mps" else torch.float64
        self._filters = torch.from_numpy(filters[self._bins]).to(dtype).to(self.device)
        window = torch.hann_window(cfg.n_fft, periodic=True, dtype=torch.float64)
        self._window = window.to(self._transform_dtype).to(self.device)

    def __call__(self, clips: ClipBatch) -> tuple[Tensor, Tensor]:
        """Computes the features of a batch.

        Args:
            clips: b clips as `plan_crop` cut them, on any device.

        Returns:
            input_features: float32 (b, 1 or 4, chunk_frames, num_mels) in dB, on the device.
            is_longer: bool (b, 1), on the device. Whether the clip has chunks of its own; always False for rand_trunc,
                whose single mel leaves nothing to fuse. Never set for a short clip, as the extractor does at random.
        """
        cfg = self.cfg
        lengths, starts = clips.lengths.tolist(), clips.chunk_starts.tolist()
        is_mel = [False] * len(lengths) if clips.is_mel is None else clips.is_mel.tolist()
        longer = [self._check(*clip) for clip in zip(lengths, is_mel, strict=True)]
        shape = (len(lengths), cfg.num_mel_images, cfg.chunk_frames, cfg.num_mels)
        features = torch.empty(shape, dtype=torch.float32, device=self.device)
        with _exact_float32(self.device):
            waves = self._split(clips.samples, [n for n, stored in zip(lengths, is_mel, strict=True) if not stored])
            of_waves = [i for i, stored in enumerate(is_mel) if not stored]
            wave_of = dict(zip(of_waves, waves, strict=True))
            short = [i for i in of_waves if not longer[i]]
            group_size = max(1, self._block_frames // cfg.chunk_frames)
            for first in range(0, len(short), group_size):
                group = short[first : first + group_size]
                for i, mel in zip(group, self._log_mel(self._pad_short([wave_of[j] for j in group])), strict=True):
                    features[i] = mel
            for i in (i for i in of_waves if longer[i]):
                self._fuse(self._mel_of_long(wave_of[i]), starts[i], out=features[i])
            self._from_stored(clips, longer, out=features)
            flags = torch.tensor(longer, dtype=torch.bool)[:, None].to(self.device, non_blocking=True)
        return features, flags

    def whole_mel(self, samples: np.ndarray) -> Tensor:
        """The log-mel of a whole clip, as it is stored.

        Args:
            samples: int16 (full scale 32767) or float32 (n,), n >= 1.

        Returns:
            float32 (frames, num_mels) in dB on the CPU: those of the padded clip, or all of a longer one.
        """
        wave = torch.from_numpy(np.ascontiguousarray(samples)).to(self.device)
        with _exact_float32(self.device):
            short = wave.numel() <= self.cfg.max_samples
            mel = self._log_mel(self._pad_short([wave]))[0] if short else self._mel_of_long(wave)
        return mel.to("cpu", torch.float32)

    def _check(self, length: int, is_mel: bool) -> bool:
        """Whether a clip of a batch is longer; that it was cut as it should be."""
        cfg = self.cfg
        assert length >= 1, "an empty clip"
        if is_mel:
            longer, wrong = length > cfg.chunk_frames, length < cfg.chunk_frames
        else:
            longer, wrong = cfg.is_longer(length), False
        fusion = cfg.truncation == "fusion"
        if not fusion:
            wrong = wrong or longer or (not is_mel and length > cfg.max_samples)
        assert not wrong, "rand_trunc clips must be cut as plan_crop says, stored mels as StoredMel.part does"
        return fusion and longer

    def _split(self, flat: Tensor, lengths: list[int]) -> Sequence[Tensor]:
        assert sum(lengths) == flat.shape[0], "lengths do not fit the samples"
        return flat.to(self.device, non_blocking=True).split(lengths) if lengths else ()

    def _from_stored(self, clips: ClipBatch, longer: list[bool], *, out: Tensor) -> None:
        """Writes the features of the clips that are stored mels."""
        if clips.mels is None or clips.is_mel is None:
            return
        at = clips.is_mel.nonzero()[:, 0].tolist()
        mels = self._split(clips.mels, clips.lengths[clips.is_mel].tolist())
        starts = clips.chunk_starts.tolist()
        for i, mel in zip(at, mels, strict=True):
            mel = mel.to(torch.float32).div_(STORED_UNITS_PER_DB)
            if longer[i]:
                self._fuse(mel, starts[i], out=out[i])
            else:
                out[i] = mel

    def _to_float(self, wave: Tensor) -> Tensor:
        """The float32 samples that a 16-bit clip stands for, in the dtype of the arithmetic."""
        if wave.dtype == torch.int16:
            wave = wave.to(torch.float32).div_(INT16_SCALE)
        return wave.to(self.dtype)

    def _pad_short(self, waves: list[Tensor]) -> Tensor:
        """Repeat-pads to a full clip, then reflects half a frame at both ends: (k, max_samples + n_fft).

        A clip that is longer by less than a hop keeps its samples and is reflected at its own end.
        """
        cfg = self.cfg
        half = cfg.n_fft // 2
        padded = torch.empty((len(waves), cfg.max_samples + cfg.n_fft), dtype=self.dtype, device=self.device)
        for row, wave in zip(padded, waves, strict=True):
            size = max(wave.numel(), cfg.max_samples)
            repeats = max(1, cfg.max_samples // wave.numel())
            filled = repeats * wave.numel()
            row[half : half + filled].view(repeats, -1).copy_(self._to_float(wave).expand(repeats, -1))
            row[half + filled : half + size] = 0.0
            self._reflect(row, size)
        return padded

    def _reflect(self, row: Tensor, size: int) -> None:
        """Mirrors the `size` samples that stand in `row` from half a frame on, without repeating the outermost one."""
        half = self.cfg.n_fft // 2
        row[:half] = row[half + 1 : 2 * half + 1].flip(0)
        end = half + size
        room = row.numel() - end
        row[end:] = row[end - 1 - room : end - 1].flip(0)

    def _log_mel(self, padded: Tensor) -> Tensor:
        """(k, n + n_fft) reflect-padded waves -> (k, frames, num_mels) in dB."""
        cfg = self.cfg
        frames = padded.unfold(-1, cfg.n_fft, cfg.hop)
        num_clips, num_frames = frames.shape[:2]
        mel = torch.empty((num_clips, num_frames, cfg.num_mels), dtype=self.dtype, device=self.device)
        num_blocks = math.ceil(num_frames / max(1, self._block_frames // num_clips))
        block = math.ceil(num_frames / num_blocks)
        for first in range(0, num_frames, block):
            part = slice(first, first + block)
            spectrum = torch.fft.rfft(frames[:, part] * self._window)[..., self._bins]
            squares = torch.view_as_real(spectrum).square()
            power = (squares[..., 0] + squares[..., 1]).to(self.dtype)
            mel[:, part] = power @ self._filters
        return mel.clamp_(min=POWER_FLOOR).log10_().mul_(10.0)

    def _mel_of_long(self, wave: Tensor) -> Tensor:
        """(n,), more than a full clip -> (frames, num_mels) in dB of all of it."""
        row = torch.empty(wave.numel() + self.cfg.n_fft, dtype=self.dtype, device=self.device)
        half = self.cfg.n_fft // 2
        row[half : half + wave.numel()] = self._to_float(wave)
        self._reflect(row, wave.numel())
        return self._log_mel(row[None])[0]

    def _fuse(self, mel: Tensor, starts: Sequence[int], *, out: Tensor) -> None:
        """Four mels of a long clip: the whole one shrunk in time, and a chunk at each of three starts.

        Source: `ClapFeatureExtractor._random_mel_fusion`; bilinear, align_corners and antialias off.

        Args:
            mel: (frames, num_mels) of the whole clip, more frames than a chunk has.
            starts: First frame of each chunk.
            out: (4, chunk_frames, num_mels), written.
        """
        num_frames = self.cfg.chunk_frames
        last = mel.shape[0] - num_frames
        assert all(0 <= start <= last for start in starts), (starts, last)
        out[0] = shrink_in_time(mel, num_frames)
        for image, start in enumerate(starts, start=1):
            out[image] = mel[start : start + num_frames]


def shrink_in_time(mel: Tensor, num_frames: int) -> Tensor:
    """Linear interpolation in time: `interpolate(mode="bilinear", align_corners=False)` of (1, 1, frames, num_mels).

    Written out because a float32 position in a mel of thousands of frames decides up to 0.03 dB, and kernels round it
    differently. Here it is rounded once, as the CPU kernel does, whatever the device.

    Args:
        mel: (frames, num_mels) in dB.
        num_frames: Frames wanted.

    Returns:
        float32 (num_frames, num_mels).
    """
    mel = mel.to(torch.float32)
    last = mel.shape[0] - 1
    scale = np.float32(last + 1) / np.float32(num_frames)
    position = np.maximum((np.arange(num_frames) + 0.5) * np.float64(scale) - 0.5, 0.0).astype(np.float32)
    before = position.astype(np.int64)
    weight = torch.from_numpy(position - before.astype(np.float32))[:, None].to(mel.device, non_blocking=True)
    left = torch.from_numpy(before).to(mel.device, non_blocking=True)
    right = torch.from_numpy(np.minimum(before + 1, last)).to(mel.device, non_blocking=True)
    return mel[left] * (1.0 - weight) + mel[right] * weight
