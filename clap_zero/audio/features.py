"""Log-mel features of CLAP on any device, equal to Hugging Face's ClapFeatureExtractor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from clap_zero.audio.clips import STORED_UNITS_PER_DB, ClipBatch, CropPlan, FeatureConfig, plan_crop
from clap_zero.audio.spectrum import LogMel, padded_wave
from clap_zero.precision import exact_float32

__all__ = ["ClapFeatures", "ClipBatch", "CropPlan", "FeatureConfig", "plan_crop"]


class ClapFeatures:
    """Log-mel of batches of clips on a device.

    The steps are those of `ClapFeatureExtractor._np_extract_fbank_features`; see `LogMel`. The features of a clip do
    not depend on the other clips of its batch. Stored mels are taken as they are. On a CPU clips go through one by one,
    on other devices short clips in groups, and a long clip takes no more memory than a group of short ones.
    """

    _CPU_BLOCK_FRAMES = 168  # more leave the cache, fewer pay more for calls: 2.96 ms for 10 s at 64, 2.51 at 256
    _DEVICE_BLOCK_FRAMES = 16_016  # 16 clips of 10 s and their spectra are 0.4 GB

    def __init__(self, cfg: FeatureConfig, *, device: torch.device | str, dtype: torch.dtype = torch.float32) -> None:
        """Args:
        cfg: Features wanted.
        device: Where they are computed.
        dtype: Of power, mel and logarithm: float32, or float64 as the reference. The Fourier transform runs in float64
            either way where the device has it, and the results are float32.
        """
        assert dtype in (torch.float32, torch.float64), dtype
        self.cfg = cfg
        self.device = torch.device(device)
        self._grouped = self.device.type != "cpu"
        self._block_frames = self._DEVICE_BLOCK_FRAMES if self._grouped else self._CPU_BLOCK_FRAMES
        self._log_mel = LogMel(cfg, device=self.device, dtype=dtype)

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
        with exact_float32(self.device):
            of_waves = [i for i, stored in enumerate(is_mel) if not stored]
            waves = dict(zip(of_waves, self._split(clips.samples, [lengths[i] for i in of_waves]), strict=True))
            self._short({i: wave for i, wave in waves.items() if not longer[i]}, out=features)
            for i, wave in waves.items():
                if longer[i]:
                    self._fuse(self._mel(wave), starts[i], out=features[i])
            of_mels = [i for i, stored in enumerate(is_mel) if stored]
            mels = () if clips.mels is None else self._split(clips.mels, [lengths[i] for i in of_mels])
            for i, units in zip(of_mels, mels, strict=True):
                mel = units.to(torch.float32).div_(STORED_UNITS_PER_DB)
                if longer[i]:
                    self._fuse(mel, starts[i], out=features[i])
                else:
                    features[i] = mel
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
        with exact_float32(self.device):
            return self._mel(self._full(wave)).to("cpu", torch.float32)

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

    def _short(self, waves: Mapping[int, Tensor], *, out: Tensor) -> None:
        """Writes the features of the clips that are no longer than a chunk; keys are their places in the batch."""
        if not self._grouped:
            for i, wave in waves.items():
                self._mel(self._full(wave), out=out[i, 0])
                out[i, 1:] = out[i, 0]
            return
        cfg, places = self.cfg, list(waves)
        group_size = max(1, self._block_frames // cfg.chunk_frames)
        for first in range(0, len(places), group_size):
            group = places[first : first + group_size]
            padded = torch.empty((len(group), cfg.max_samples + cfg.n_fft), device=self.device)
            for row, i in zip(padded, group, strict=True):
                padded_wave(self._full(waves[i]), -(cfg.n_fft // 2), out=row)
            for i, mel in zip(group, self._log_mel.of_rows(padded), strict=True):
                out[i] = mel

    def _full(self, wave: Tensor) -> Tensor:
        """The clip, a shorter one repeated as often as it fits and padded with zeros to max_samples."""
        size, length = self.cfg.max_samples, wave.shape[0]
        if length >= size:
            return wave
        full = torch.empty(size, dtype=wave.dtype, device=self.device)
        filled = size // length * length
        full[:filled].view(-1, length).copy_(wave.expand(size // length, -1))
        full[filled:] = 0
        return full

    def _mel(self, wave: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Log-mel (frames, num_mels) of all of a wave that fills a chunk at least; float32 where `out` is given."""
        shape, dtype = (self.cfg.num_frames(wave.shape[0]), self.cfg.num_mels), self._log_mel.dtype
        in_place = out is not None and out.dtype == dtype
        mel = out if out is not None and in_place else torch.empty(shape, dtype=dtype, device=self.device)
        self._log_mel.of_wave(wave, out=mel, block_frames=self._block_frames)
        return mel if out is None or in_place else out.copy_(mel)

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
    return mel[left].mul_(1.0 - weight).add_(mel[right].mul_(weight))
