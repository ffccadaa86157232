"""Decoding with torchcodec and FFmpeg's libraries, where they are there."""

from __future__ import annotations

import functools
import io

import numpy as np
import soundfile

from clap_zero.audio.kinds import AudioError
from clap_zero.audio.sound import DecodedAudio, Part, check_rate
from clap_zero.audio.waveform import mix_down


@functools.cache
def problem() -> str | None:
    """Why torchcodec cannot be used here; None where it can."""
    try:
        # Here, because it is heavy. It may be installed and find no FFmpeg libraries, which it says at import or only
        # when it first decodes.
        from torchcodec.decoders import AudioDecoder

        probe = io.BytesIO()
        soundfile.write(probe, np.zeros(16, dtype=np.float32), 8000, format="WAV")
        AudioDecoder(probe.getvalue())
    except ImportError:
        return "torchcodec is not installed"
    except (OSError, RuntimeError):
        return "torchcodec finds no FFmpeg libraries"
    return None


def decode_with_ffmpeg(data: bytes, kind: str, part: Part) -> DecodedAudio:
    """Decodes part of a file of any kind.

    Args:
        data: The whole file.
        kind: What it is, for messages.
        part: What is wanted of it.

    Raises:
        AudioError: It cannot be decoded, or FFmpeg is not there.
    """
    missing = problem()
    if missing is not None:
        raise AudioError(f"found {kind}: needs torchcodec and FFmpeg to be decoded, and {missing}")
    from torchcodec.decoders import AudioDecoder

    try:
        decoder = AudioDecoder(data)
        rate_hz = decoder.metadata.sample_rate or 0
        check_rate(rate_hz, kind)
        # The duration is an estimate for raw streams: it serves to draw a start, not to end the clip.
        duration_s = decoder.metadata.duration_seconds or part.duration_s
        start, _ = part.place(round(duration_s * rate_hz), rate_hz)
        wanted = round(part.duration_s * rate_hz)
        found = decoder.get_samples_played_in_range(start / rate_hz, (start + wanted) / rate_hz).data
        if found.shape[-1] == 0 and part.rng is not None:
            found = decoder.get_samples_played_in_range(0.0, part.duration_s).data
    except (RuntimeError, ValueError, IndexError) as error:
        # torchcodec's messages begin with its function and C++ file.
        message = str(error).strip().partition("\n")[0].rpartition(", ")[2]
        raise AudioError(f"{kind} cannot be decoded: {message}") from error
    return DecodedAudio(mix_down(found.numpy().T), rate_hz, kind, found.shape[0])
