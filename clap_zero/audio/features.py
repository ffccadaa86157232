"""Log-mel features of CLAP on any device, equal to Hugging Face's ClapFeatureExtractor."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from clap_zero.audio.clips import STORED_UNITS_PER_DB, ClipBatch, CropPlan, FeatureConfig, plan_crop
from clap_zero.audio.spectrum import LogMel
from clap_zero.audio.waveform import INT16_SCALE

__all__ = ["ClapFeatures", "ClipBatch", "CropPlan", "FeatureConfig", "plan_crop"]


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

    The steps are those of `ClapFeatureExtractor._np_extract_fbank_features`; see `LogMel`. The features of a clip do
    not depend on the other clips of its batch. Stored mels are taken as they are. On a CPU clips go through one by one,
    on other devices short clips in groups, and a long clip takes no more memory than a group of short ones.
    """

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
        self.dtype = dtype
        self.log_mel = LogMel(cfg, device=self.device, dtype=dtype)

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
            of_waves = [i for i, stored in enumerate(is_mel) if not stored]
            waves = dict(zip(of_waves, self._split(clips.samples, [lengths[i] for i in of_waves]), strict=True))
            self._short(waves, [i for i in of_waves if not longer[i]], out=features)
            for i in of_waves:
                if longer[i]:
                    self._fuse(self._mel_of_long(waves[i]), starts[i], out=features[i])
            of_mels = [i for i, stored in enumerate(is_mel) if stored]
            if clips.mels is not None:
                for i, stored_mel in zip(of_mels, self._split(clips.mels, [lengths[i] for i in of_mels]), strict=True):
                    mel = stored_mel.to(torch.float32).div_(STORED_UNITS_PER_DB)
                    if longer[i]:
                        self._fuse(mel, starts[i], out=features[i])
                    else:
                        features[i] = mel
            flags = torch.tensor(longer, dtype=torch.bool)[:, None].to(self.device, non_blocking=True)
        return features, flags

    def _short(self, waves: Mapping[int, Tensor], which: list[int], *, out: Tensor) -> None:
        """Writes the features of the clips that are no longer than a chunk."""
        if self.device.type == "cpu" and self.dtype == torch.float32:
            for i in which:  # written in place: copies count here
                self.log_mel(self._pad_short([waves[i]]), out=out[i, :1])
                out[i, 1:] = out[i, 0]
            return
        group_size = max(1, self.log_mel.block_frames // self.cfg.chunk_frames)
        for first in range(0, len(which), group_size):
            group = which[first : first + group_size]
            for i, mel in zip(group, self.log_mel(self._pad_short([waves[j] for j in group])), strict=True):
                out[i] = mel

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
            mel = self.log_mel(self._pad_short([wave]))[0] if short else self._mel_of_long(wave)
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

    @staticmethod
    def _to_float(wave: Tensor) -> Tensor:
        """The float32 samples that a 16-bit clip stands for."""
        return wave.to(torch.float32).div_(INT16_SCALE) if wave.dtype == torch.int16 else wave

    def _pad_short(self, waves: list[Tensor]) -> Tensor:
        """Repeat-pads to a full clip, then reflects half a frame at both ends: (k, max_samples + n_fft).

        A clip that is longer by less than a hop keeps its samples and is reflected at its own end.
        """
        cfg = self.cfg
        half = cfg.n_fft // 2
        padded = torch.empty(
            (len(waves), cfg.max_samples + cfg.n_fft), dtype=self.log_mel.transform_dtype, device=self.device
        )
        for row, wave in zip(padded, waves, strict=True):
            length = max(wave.numel(), cfg.max_samples)
            repeats = max(1, cfg.max_samples // wave.numel())
            filled = repeats * wave.numel()
            row[half : half + filled].view(repeats, -1).copy_(self._to_float(wave).expand(repeats, -1))
            row[half + filled : half + length] = 0.0
            self._reflect(row, length)
        return padded

    def _reflect(self, row: Tensor, size: int) -> None:
        """Mirrors the `size` samples that stand in `row` from half a frame on, without repeating the outermost one."""
        half = self.cfg.n_fft // 2
        row[:half] = row[half + 1 : 2 * half + 1].flip(0)
        end = half + size
        room = row.numel() - end
        row[end:] = row[end - 1 - room : end - 1].flip(0)

    def _mel_of_long(self, wave: Tensor) -> Tensor:
        """(n,), more than a full clip -> (frames, num_mels) in dB of all of it."""
        row = torch.empty(wave.numel() + self.cfg.n_fft, dtype=self.log_mel.transform_dtype, device=self.device)
        half = self.cfg.n_fft // 2
        row[half : half + wave.numel()] = self._to_float(wave)
        self._reflect(row, wave.numel())
        return self.log_mel(row[None])[0]

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
