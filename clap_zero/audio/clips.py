"""How a model wants its features, which part of a clip they are made of, and clips on their way to the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from clap_zero.audio import shared
from clap_zero.audio.waveform import crop, to_int16
from clap_zero.errors import ConfigError

STORED_UNITS_PER_DB = 256
"""Stored log-mels are int16 in units of 1/256 dB: -128 to 127.996 dB."""


@dataclass(frozen=True)
class FeatureConfig:
    """How a model wants its log-mel.

    Attributes:
        truncation: "rand_trunc": one mel of one crop (Slaney filters). "fusion": four mels, the whole clip shrunk and a
            chunk from each third (HTK filters).
        sample_rate_hz: Rate of the waveforms.
        n_fft: Samples of a frame and of its Hann window.
        hop: Samples from frame to frame.
        num_mels: Mel bands.
        f_min: Lower edge of the lowest band in Hz.
        f_max: Upper edge of the highest band in Hz.
        max_samples: Samples of a full clip (10 s), whole seconds; shorter ones are repeat-padded to it.
    """

    truncation: Literal["rand_trunc", "fusion"]
    sample_rate_hz: int = 48_000
    n_fft: int = 1024
    hop: int = 480
    num_mels: int = 64
    f_min: float = 50.0
    f_max: float = 14_000.0
    max_samples: int = 480_000

    def __post_init__(self) -> None:
        if self.truncation not in ("rand_trunc", "fusion"):
            raise ConfigError(f"truncation {self.truncation!r} is not supported: use 'rand_trunc' or 'fusion'")
        if min(self.sample_rate_hz, self.n_fft, self.hop, self.num_mels, self.max_samples) <= 0 or self.n_fft % 2:
            raise ConfigError(f"feature sizes must be positive and n_fft even: {self}")
        if self.max_samples <= self.n_fft // 2:
            raise ConfigError(f"max_samples {self.max_samples} must be more than half of n_fft {self.n_fft}")
        if not 0 <= self.f_min < self.f_max <= self.sample_rate_hz / 2:
            raise ConfigError(f"need 0 <= f_min < f_max <= sample_rate_hz / 2: {self}")
        if self.hop > self.n_fft // 2:
            raise ConfigError(f"hop {self.hop} must be at most half of n_fft {self.n_fft}: samples would be left out")
        if self.max_samples % self.sample_rate_hz:
            raise ConfigError(
                f"max_samples {self.max_samples} must be whole seconds at {self.sample_rate_hz} Hz: Hugging Face's "
                "extractor fails with others"
            )

    @property
    def chunk_frames(self) -> int:
        """Frames of a full clip."""
        return self.num_frames(self.max_samples)

    @property
    def mel_scale(self) -> Literal["htk", "slaney"]:
        """Kind of mel filters; see `mel_filters`."""
        return "htk" if self.truncation == "fusion" else "slaney"

    @property
    def num_mel_images(self) -> int:
        """Channels of the features: 4 for fusion, else 1."""
        return 4 if self.truncation == "fusion" else 1

    def num_frames(self, num_samples: int) -> int:
        """Frames of a clip: hops that fit, and one (frames are centred)."""
        return num_samples // self.hop + 1

    def is_longer(self, num_samples: int) -> bool:
        """Whether a clip of `num_samples` gets chunks of its own in fusion mode.

        True iff its mel has more frames than a chunk. A clip that is longer by less than a hop has as many frames as a
        chunk: it is treated as short, as the extractor does.
        """
        return num_samples > self.max_samples and self.num_frames(num_samples) > self.chunk_frames

    @classmethod
    def from_preprocessor(cls, preprocessor: Mapping[str, Any]) -> FeatureConfig:
        """Reads the contents of a Hugging Face `preprocessor_config.json`.

        Absent keys have the defaults of ClapFeatureExtractor; nb_max_samples counts where max_length_s is absent.
        `top_db` and `padding_value` are not looked at: the extractor stores them and never applies them.

        Raises:
            ConfigError: The file belongs to another extractor or asks for what we do not support.
        """
        kind = preprocessor.get("feature_extractor_type", "ClapFeatureExtractor")
        if kind != "ClapFeatureExtractor":
            raise ConfigError(f"preprocessor_config.json is for {kind}; only ClapFeatureExtractor is supported")
        padding = preprocessor.get("padding", "repeatpad")
        if padding != "repeatpad":
            raise ConfigError(f"preprocessor_config.json: padding {padding!r} is not supported, only 'repeatpad'")
        try:
            sample_rate_hz = int(preprocessor.get("sampling_rate", 48_000))
            hop = int(preprocessor.get("hop_length", 480))
            if "max_length_s" in preprocessor or "nb_max_samples" not in preprocessor:
                max_samples = int(preprocessor.get("max_length_s", 10) * sample_rate_hz)
            else:
                max_samples = int(preprocessor["nb_max_samples"])
            config = {
                "n_fft": int(preprocessor.get("fft_window_size", 1024)),
                "num_mels": int(preprocessor.get("feature_size", 64)),
                "f_min": float(preprocessor.get("frequency_min", 0)),
                "f_max": float(preprocessor.get("frequency_max", 14_000)),
            }
        except (TypeError, ValueError) as error:
            raise ConfigError(f"preprocessor_config.json: a size is not a number: {error}") from error
        return cls(
            truncation=preprocessor.get("truncation", "fusion"),
            sample_rate_hz=sample_rate_hz,
            hop=hop,
            max_samples=max_samples,
            **config,  # type: ignore[arg-type]  # each has been made an int or a float above
        )

    def to_preprocessor(self) -> dict[str, Any]:
        """Contents of the `preprocessor_config.json` that makes ClapFeatureExtractor give these features."""
        return {
            "feature_extractor_type": "ClapFeatureExtractor",
            "processor_class": "ClapProcessor",
            "feature_size": self.num_mels,
            "sampling_rate": self.sample_rate_hz,
            "hop_length": self.hop,
            # The extractor multiplies this by the rate and slices with it: it has to be an integer.
            "max_length_s": self.max_samples // self.sample_rate_hz,
            "fft_window_size": self.n_fft,
            "padding_value": 0.0,
            "padding_side": "right",
            "return_attention_mask": False,
            "frequency_min": self.f_min,
            "frequency_max": self.f_max,
            "top_db": None,
            "truncation": self.truncation,
            "padding": "repeatpad",
        }


@dataclass(frozen=True)
class CropPlan:
    """Which part of a clip is used, and where its chunks start.

    Attributes:
        start_sample: First sample of the part.
        num_samples: Its length.
        chunk_starts: First mel frame (of the part's mel) of the chunks from the front, the middle and the back third;
            (0, 0, 0) where there are no chunks.
    """

    start_sample: int
    num_samples: int
    chunk_starts: tuple[int, int, int] = (0, 0, 0)


def plan_crop(num_samples: int, cfg: FeatureConfig, rng: np.random.Generator | None) -> CropPlan:
    """Chooses the part of a clip for rand_trunc, the chunks for fusion. Runs in loader workers.

    The ranges are the extractor's: any start for rand_trunc; for fusion the possible starts in three parts as
    `np.array_split` cuts them, an empty part meaning 0.

    Args:
        num_samples: Length of the clip, at least 1.
        cfg: Features wanted.
        rng: Draws uniformly from the ranges (training). None takes the centre of the clip, or the middle of each third:
            the same for every call (evaluation).
    """
    assert num_samples >= 1, num_samples
    if cfg.truncation == "rand_trunc":
        overflow = num_samples - cfg.max_samples
        if overflow <= 0:
            return CropPlan(0, num_samples)
        start = overflow // 2 if rng is None else int(rng.integers(overflow + 1))
        return CropPlan(start, cfg.max_samples)
    if not cfg.is_longer(num_samples):
        return CropPlan(0, num_samples)
    num_starts = cfg.num_frames(num_samples) - cfg.chunk_frames + 1
    starts = []
    first = 0
    for third in range(3):
        size = num_starts // 3 + (third < num_starts % 3)
        if size == 0:
            starts.append(0)
        else:
            starts.append(first + (size // 2 if rng is None else int(rng.integers(size))))
        first += size
    return CropPlan(0, num_samples, (starts[0], starts[1], starts[2]))


@dataclass
class ClipBatch:
    """Clips of different lengths, flat, as they travel from the workers to the device: waveforms, stored mels, or both.

    Attributes:
        samples: int16 (full scale 32767) or float32 (total,): the waveforms one after another.
        lengths: int64 (b,), always on the CPU; samples of each waveform, frames of each stored mel, at least 1.
        chunk_starts: int64 (b, 3), always on the CPU; see CropPlan. Read only in fusion mode for longer clips.
        mels: int16 (total, num_mels) in units of 1/256 dB: the stored mels one after another; None: there are none.
        is_mel: bool (b,), always on the CPU: which clips are stored mels; None: none is.
    """

    samples: Tensor
    lengths: Tensor
    chunk_starts: Tensor
    mels: Tensor | None = None
    is_mel: Tensor | None = None

    def __len__(self) -> int:
        return self.lengths.shape[0]

    @classmethod
    def from_parts(cls, parts: Sequence[np.ndarray], chunk_starts: Sequence[Sequence[int]]) -> ClipBatch:
        """Joins parts that are cut already.

        Args:
            parts: Waveforms (n,), all int16 or all float32, and stored mels int16 (m, num_mels), in any order.
            chunk_starts: Three for each part.
        """
        waves = [part for part in parts if part.ndim == 1]
        batch = cls(
            _joined(waves) if waves else torch.zeros(0, dtype=torch.int16),
            torch.tensor([part.shape[0] for part in parts], dtype=torch.int64),
            torch.tensor(chunk_starts, dtype=torch.int64).reshape(len(parts), 3),
        )
        if len(waves) < len(parts):
            batch.mels = _joined([part for part in parts if part.ndim == 2])
            batch.is_mel = torch.tensor([part.ndim == 2 for part in parts])
        return batch

    @classmethod
    def from_clips(
        cls,
        clips: Sequence[np.ndarray],
        cfg: FeatureConfig,
        *,
        rng: np.random.Generator | None = None,
        as_int16: bool = True,
    ) -> ClipBatch:
        """Plans, cuts and joins float clips (n,) at cfg.sample_rate_hz; as_int16 makes LAION's 16-bit round trip."""
        plans = [plan_crop(clip.size, cfg, rng) for clip in clips]
        parts = [crop(clip, plan.start_sample, plan.num_samples) for clip, plan in zip(clips, plans, strict=True)]
        convert = to_int16 if as_int16 else np.float32
        return cls.from_parts([np.asarray(convert(part)) for part in parts], [plan.chunk_starts for plan in plans])

    def pin_memory(self) -> ClipBatch:
        """A copy whose samples and mels are in page-locked memory."""
        mels = None if self.mels is None else self.mels.pin_memory()
        return replace(self, samples=self.samples.pin_memory(), mels=mels)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> ClipBatch:
        """Moves samples and mels; the rest stays on the CPU, where ClapFeatures reads it without a sync."""
        mels = None if self.mels is None else self.mels.to(device, non_blocking=non_blocking)
        return replace(self, samples=self.samples.to(device, non_blocking=non_blocking), mels=mels)


def _joined(parts: Sequence[np.ndarray]) -> Tensor:
    """The parts one after another; in a loader worker in shared memory, where the batch has to go: one copy less."""
    if get_worker_info() is None:
        return torch.from_numpy(np.concatenate(parts))
    joined = shared.empty((sum(part.shape[0] for part in parts), *parts[0].shape[1:]), parts[0].dtype)
    return torch.from_numpy(np.concatenate(parts, out=joined))
