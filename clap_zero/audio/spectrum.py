"""Frames of a waveform -> log-mel, in blocks that stay in the cache of a CPU or fill a GPU."""

from __future__ import annotations

import math
import threading

import numpy as np
import torch
from torch import Tensor

from clap_zero.audio.clips import FeatureConfig
from clap_zero.audio.mel import mel_filters
from clap_zero.audio.waveform import INT16_SCALE

POWER_FLOOR = 1e-10
"""Smallest mel power before the logarithm: -100 dB is what digital silence gives."""


class _PerThread(threading.local):
    """Holds the buffers of each thread; copies and pickles of it are empty."""

    workspace: _Workspace | None = None

    def __reduce__(self) -> tuple[type[_PerThread], tuple[()]]:
        return _PerThread, ()


class LogMel:
    """Periodic Hann window, power spectrum, mel filters, 10 log10(max(x, 1e-10)) of frames that are centred on hops.

    On a CPU more than half of the time is the transform's; the rest is kept small by these means. A block of frames
    goes through all steps in the same buffers, which stay: made anew, their page faults cost as much as the arithmetic.
    Only the bins under the filters leave float64. Real and imaginary parts stay side by side: both are squared, and the
    filters have each row twice, so that the matrix product adds them up. Filters are multiplied in four bands, as each
    has few bins. Blocks are of one size, so that all views are made once; the last one begins early.
    """

    _CPU_BAND_MELS = 16  # MKL multiplies by 16 columns at once

    def __init__(self, cfg: FeatureConfig, *, device: torch.device, dtype: torch.dtype) -> None:
        """Args:
        cfg: Features wanted.
        device: Where they are computed.
        dtype: Of power, mel and logarithm.
        """
        on_cpu = device.type == "cpu"
        self.cfg, self.device, self.dtype = cfg, device, dtype
        # A float32 transform leaves noise of about 1e-7 of the loudest bin in all others: 0.1 dB in quiet cells of real
        # clips, 0.6 dB beside a pure tone. In float64 it takes 1.9 times as long. MPS has no float64.
        self.transform_dtype = torch.float32 if device.type == "mps" else torch.float64
        window = torch.hann_window(cfg.n_fft, periodic=True, dtype=torch.float64)
        self._window = window.to(self.transform_dtype).to(device)
        filters = mel_filters(
            scale=cfg.mel_scale,
            n_fft=cfg.n_fft,
            num_mels=cfg.num_mels,
            sample_rate_hz=cfg.sample_rate_hz,
            f_min_hz=cfg.f_min,
            f_max_hz=cfg.f_max,
        )
        self._bins = _used_bins(filters, default=0)
        width = self._CPU_BAND_MELS if on_cpu else cfg.num_mels
        self.bands: list[tuple[slice, slice, Tensor]] = []
        for first in range(0, cfg.num_mels, width):
            mels = slice(first, min(first + width, cfg.num_mels))
            bins = _used_bins(filters[:, mels], default=self._bins.start)
            weights = torch.from_numpy(np.repeat(filters[bins, mels], 2, axis=0))
            columns = slice(2 * (bins.start - self._bins.start), 2 * (bins.stop - self._bins.start))
            self.bands.append((columns, mels, weights.to(dtype).to(device)))
        self.num_bins = self._bins.stop - self._bins.start
        self._per_thread = _PerThread()

    def of_rows(self, padded: Tensor) -> Tensor:
        """The log-mel of clips of equal length, all frames at once: for a GPU.

        Args:
            padded: float32 (k, n + n_fft), as `padded_wave` writes them.

        Returns:
            (k, frames, num_mels) in `dtype`, in dB.
        """
        cfg = self.cfg
        frames = padded.unfold(-1, cfg.n_fft, cfg.hop)
        mel = torch.empty((*frames.shape[:2], cfg.num_mels), dtype=self.dtype, device=self.device)
        squares = self._parts((frames * self._window).flatten(0, 1)).to(self.dtype).square_().flatten(1)
        for columns, mels, weights in self.bands:
            torch.mm(squares[:, columns], weights, out=mel.flatten(0, 1)[:, mels])
        return mel.clamp_(min=POWER_FLOOR).log10_().mul_(10.0)

    def of_wave(self, wave: Tensor, *, out: Tensor, block_frames: int) -> Tensor:
        """The log-mel of one clip, reflected at its ends, in blocks of frames.

        Args:
            wave: int16 or float32 (n,), more than half a frame.
            out: (frames, num_mels) in `dtype`, contiguous, written.
            block_frames: Most frames of a block; memory grows with them, not with the clip.

        Returns:
            `out`, in dB.
        """
        cfg = self.cfg
        num_frames = out.shape[0]
        assert num_frames == cfg.num_frames(wave.shape[0]), (num_frames, wave.shape)
        work = self._workspace(math.ceil(num_frames / math.ceil(num_frames / block_frames)))
        for start in range(0, num_frames, work.block):
            first = min(start, num_frames - work.block)
            padded_wave(wave, first * cfg.hop - cfg.n_fft // 2, out=work.samples)
            work.precise.copy_(work.samples)
            torch.mul(work.frames, self._window, out=work.windowed)
            work.parts.copy_(self._parts(work.windowed))
            torch.mul(work.parts, work.parts, out=work.parts)
            for squares, weights, power in work.bands:
                torch.mm(squares, weights, out=power)
            torch.clamp(work.power, min=POWER_FLOOR, out=out[first : first + work.block])
        return out.log10_().mul_(10.0)

    def _parts(self, windowed: Tensor) -> Tensor:
        """Real and imaginary parts of the bins under the filters, (m, bins, 2), of windowed frames (m, n_fft)."""
        # Not with out=: the transform would make a new tensor all the same, and copy it.
        return torch.view_as_real(torch.fft.rfft(windowed))[:, self._bins]

    def _workspace(self, block: int) -> _Workspace:
        """Buffers for blocks of that many frames: on a CPU those of the thread, elsewhere the allocator keeps them."""
        work = self._per_thread.workspace
        if work is None or work.block != block:
            work = _Workspace(self, block)
            if self.device.type == "cpu":
                self._per_thread.workspace = work
        return work


class _Workspace:
    """Buffers of one block of frames, and the views of them that each block needs."""

    def __init__(self, log_mel: LogMel, block: int) -> None:
        cfg, device, dtype = log_mel.cfg, log_mel.device, log_mel.dtype
        num_samples = (block - 1) * cfg.hop + cfg.n_fft
        self.block = block
        self.samples = torch.empty(num_samples, device=device)
        self.precise = torch.empty(num_samples, dtype=log_mel.transform_dtype, device=device)
        self.frames = self.precise.unfold(0, cfg.n_fft, cfg.hop)
        self.windowed = torch.empty((block, cfg.n_fft), dtype=log_mel.transform_dtype, device=device)
        self.parts = torch.empty((block, log_mel.num_bins, 2), dtype=dtype, device=device)
        self.power = torch.empty((block, cfg.num_mels), dtype=dtype, device=device)
        flat = self.parts.flatten(1)
        self.bands = [(flat[:, columns], weights, self.power[:, mels]) for columns, mels, weights in log_mel.bands]


def padded_wave(wave: Tensor, start: int, *, out: Tensor) -> None:
    """Writes samples of a wave that is mirrored at both ends, without repeating the outermost sample.

    Args:
        wave: int16 (full scale 32767) or float32 (n,).
        start: The first sample wanted; negative: before the wave.
        out: float32, written; reaches over the ends by less than n.
    """
    size, stop = wave.shape[0], start + out.shape[0]
    before, behind = max(0, -start), max(0, stop - size)
    if before or behind:
        end = out.shape[0] - behind
        out[before:end] = wave[start + before : stop - behind]
        out[:before] = wave[1 : before + 1].flip(0)
        out[end:] = wave[size - 1 - behind : size - 1].flip(0)
    else:
        out.copy_(wave[start:stop])
    if wave.dtype == torch.int16:
        out.div_(INT16_SCALE)


def _used_bins(filters: np.ndarray, *, default: int) -> slice:
    """Which bins have weight in filters (bins, mels): these lie side by side.

    Filters that are narrower than a bin may miss all of them; then the bin `default`, whose weights are zero.
    """
    used = np.nonzero(filters.sum(axis=1))[0]
    return slice(int(used[0]), int(used[-1]) + 1) if used.size else slice(default, default + 1)
