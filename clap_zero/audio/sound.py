"""What decoding gives, and which part of a clip is asked for; shared by the decoders."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clap_zero.audio.kinds import AudioError

MIN_RATE_HZ = 4_000
MAX_RATE_HZ = 384_000


@dataclass(frozen=True)
class DecodedAudio:
    """Part of a clip at its own sampling rate.

    Attributes:
        samples: float32 (n,), mono, finite, n >= 1; not clipped to [-1, 1].
        sample_rate_hz: Rate of the samples.
        kind: Format that was found, such as "FLAC".
        num_channels: Channels of the file.
        note: One line where the file is damaged and only its readable part is used, else None.
    """

    samples: np.ndarray
    sample_rate_hz: int
    kind: str
    num_channels: int
    note: str | None = None


@dataclass(frozen=True)
class Part:
    """The part of a clip that is wanted, in seconds; with a generator its start is drawn."""

    start_s: float
    duration_s: float
    rng: np.random.Generator | None

    def place(self, num_frames: int, rate_hz: int) -> tuple[int, int]:
        """First frame and number of frames in a clip of `num_frames`."""
        wanted = max(1, round(self.duration_s * rate_hz))
        if self.rng is None:
            start = round(self.start_s * rate_hz)
        else:
            start = int(self.rng.integers(max(0, num_frames - wanted) + 1))
        return start, min(wanted, max(0, num_frames - start))


def check_rate(rate_hz: float, kind: str) -> None:
    """Raises AudioError for a rate that no recording has."""
    if not MIN_RATE_HZ <= rate_hz <= MAX_RATE_HZ:
        raise AudioError(f"{kind} has a sampling rate of {rate_hz:g} Hz, outside {MIN_RATE_HZ} to {MAX_RATE_HZ} Hz")
