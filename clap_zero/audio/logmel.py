"""The stored log-mel of a whole clip: 16-bit fixed point, so that training needs no decoding.

Layout, little-endian: a header of 64 bytes (`_HEADER`: what the mel was made with, the clip's length, a checksum),
then int16 (frames, num_mels), frame by frame, in units of 1/256 dB. Rounding costs at most 1/512 dB; digital silence
(-100 dB) is exact.

A clip of up to 10 s is stored as the frames of its repeat-padded form, so nothing is lost. Of a longer one the mel of
the whole clip is stored, and crops are cut at hop resolution. A frame whose window reaches over the edge of a crop then
has the sound that really goes on there, where the crop of a waveform is mirrored at its edge. With windows of 1024 and
hops of 480 samples these are frames 0 and 1 and the last two: the outermost by half a window, the others by 32 samples
at the foot of the window.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import Literal

import numpy as np

from clap_zero.audio.clips import STORED_UNITS_PER_DB, FeatureConfig, plan_crop
from clap_zero.audio.features import ClapFeatures
from clap_zero.audio.kinds import AudioError

_MAGIC = b"CLAPMEL"
_VERSION = 1

# magic, version, 1 for Slaney filters and 0 for HTK; sample_rate_hz, n_fft, hop, num_mels, max_samples; f_min, f_max;
# samples of the clip, frames stored, CRC-32 of all the rest.
_HEADER = struct.Struct("<7sBB3x5I2dQ2I")
_CRC_BYTES = 4


@dataclass(frozen=True)
class StoredMel:
    """The log-mel of a whole clip as it was stored.

    Attributes:
        frames: int16 (num_frames, num_mels) in units of 1/256 dB; read-only, a view of the bytes.
        num_samples: Length of the clip that it was made of.
    """

    frames: np.ndarray
    num_samples: int

    def part(
        self, cfg: FeatureConfig, rng: np.random.Generator | None, *, max_seconds: float | None = None
    ) -> tuple[np.ndarray, tuple[int, int, int]]:
        """Cuts what `ClipBatch.from_parts` takes, at hop resolution.

        The draws are those that `load_clip` and `plan_crop` make for the waveform, so that a sample has the same chunks
        in either form, and its crop starts less than a hop before that of the waveform.

        Args:
            cfg: Features wanted, those that it was decoded for.
            rng: Draws the part and the chunks (training); None takes the fixed ones of evaluation.
            max_seconds: Longest part of the clip that is used; None: all. At least a full clip is.

        Returns:
            frames: int16 (m, num_mels): chunk_frames of them, or more in fusion mode for a longer clip; a view.
            chunk_starts: First frame of each chunk, as CropPlan has them.
        """
        first, num_samples = 0, self.num_samples
        if max_seconds is not None:
            wanted = max(cfg.max_samples, round(max_seconds * cfg.sample_rate_hz))
            start = 0 if rng is None else int(rng.integers(max(0, num_samples - wanted) + 1))
            first, num_samples = start // cfg.hop, min(num_samples, wanted)
        plan = plan_crop(num_samples, cfg, rng)
        first += plan.start_sample // cfg.hop
        num_frames = _num_frames(plan.num_samples, cfg)
        return self.frames[first : first + num_frames], plan.chunk_starts


def _num_frames(num_samples: int, cfg: FeatureConfig) -> int:
    """Frames that are stored of a clip."""
    return cfg.num_frames(max(num_samples, cfg.max_samples))


def to_pcm16(samples: np.ndarray) -> np.ndarray:
    """float -> the 16-bit numbers that an audio file holds: full scale 32768, rounded, clamped."""
    return np.clip(np.rint(samples * np.float32(32768.0)), -32768, 32767).astype(np.int16)


def encode_logmel(samples: np.ndarray, features: ClapFeatures) -> bytes:
    """The log-mel of a whole clip, made of the samples that training would see if the clip were stored as FLAC.

    Args:
        samples: (n,) mono at the features' rate, n >= 1: int16 as a 16-bit file holds them, or float32 (full scale 1),
            which are rounded to those.
        features: Computes them; its truncation decides between the two kinds of filters.

    Returns:
        About num_mels * 2 bytes a hop: 128 kB for up to 10 s, 12.8 kB for every further second.
    """
    assert samples.ndim == 1 and samples.size >= 1, samples.shape
    pcm = samples if samples.dtype == np.int16 else to_pcm16(samples)
    # v / 32768 * 32767 truncated towards zero, which is LAION's round trip of what a 16-bit file decodes to.
    frames = features.whole_mel(pcm - np.sign(pcm)).numpy()
    stored = np.clip(np.rint(frames * np.float32(STORED_UNITS_PER_DB)), -32768, 32767).astype("<i2").tobytes()
    return _header(features.cfg, samples.size, frames.shape[0], stored) + stored


def _header(cfg: FeatureConfig, num_samples: int, num_frames: int, stored: bytes) -> bytes:
    made_with = (cfg.sample_rate_hz, cfg.n_fft, cfg.hop, cfg.num_mels, cfg.max_samples, cfg.f_min, cfg.f_max)
    slaney = int(cfg.mel_scale == "slaney")
    header = _HEADER.pack(_MAGIC, _VERSION, slaney, *made_with, num_samples, num_frames, 0)[:-_CRC_BYTES]
    return header + zlib.crc32(stored, zlib.crc32(header)).to_bytes(_CRC_BYTES, "little")


def is_logmel(data: bytes) -> bool:
    """Whether a file is a stored log-mel, told from its first bytes."""
    return data[: len(_MAGIC)] == _MAGIC


def stored_truncation(data: bytes) -> Literal["fusion", "rand_trunc"] | None:
    """The kind of model that a stored log-mel was made for, as its header says it; None where that is cut off."""
    if len(data) < _HEADER.size:
        return None
    return "rand_trunc" if data[len(_MAGIC) + 1] else "fusion"


def decode_logmel(data: bytes, cfg: FeatureConfig) -> StoredMel:
    """Reads a stored log-mel; costs no memory beside `data`, whatever its header claims.

    Args:
        data: The whole file.
        cfg: Features wanted. Stored mels serve only features with the same filters and sizes.

    Raises:
        AudioError: It is damaged, or was made for other features.
    """
    if len(data) < _HEADER.size or not is_logmel(data):
        raise AudioError(f"stored log-mel is cut short: {len(data)} bytes, its header alone has {_HEADER.size}")
    _, version, slaney, *made_with, num_samples, num_frames, crc = _HEADER.unpack_from(data)
    if version != _VERSION:
        raise AudioError(f"stored log-mel has format version {version}, this clap_zero reads {_VERSION}: pack again")
    _check_made_for(("slaney" if slaney else "htk", *made_with), cfg)
    if num_samples < 1 or num_frames != _num_frames(num_samples, cfg):
        raise AudioError(f"stored log-mel is damaged: its header claims {num_frames} frames of {num_samples} samples")
    expected = _HEADER.size + num_frames * cfg.num_mels * 2
    if len(data) != expected:
        raise AudioError(f"stored log-mel is damaged or cut short: {len(data)} bytes, its header promises {expected}")
    stored = memoryview(data)[_HEADER.size :]
    if zlib.crc32(stored, zlib.crc32(data[: _HEADER.size - _CRC_BYTES])) != crc:
        raise AudioError("stored log-mel is damaged: its checksum does not fit")
    frames = np.frombuffer(stored, dtype="<i2").astype(np.int16, copy=False)
    return StoredMel(frames.reshape(num_frames, cfg.num_mels), num_samples)


def _check_made_for(made_with: tuple[str | float, ...], cfg: FeatureConfig) -> None:
    names = ("mel_scale", "sample_rate_hz", "n_fft", "hop", "num_mels", "max_samples", "f_min", "f_max")
    differing = [
        f"{name} {was:{'' if isinstance(was, str) else 'g'}} for {getattr(cfg, name)}"
        for name, was in zip(names, made_with, strict=True)
        if was != getattr(cfg, name)
    ]
    if differing:
        out = f"pack again with --store logmel --truncation {cfg.truncation}, or train from audio"
        if made_with[1:] == tuple(getattr(cfg, name) for name in names[1:]):
            other = "rand_trunc" if made_with[0] == "slaney" else "fusion"
            out += f", or take a {other} model for it (--truncation {other} of check and bench)"
        raise AudioError(f"stored log-mel was made for another model ({', '.join(differing)}): {out}")
