"""Bytes of an audio file -> mono waveform, in bounded time and memory whatever the header claims.

The kind is told from the content. libsndfile (soundfile) decodes WAV, FLAC, Ogg Vorbis, Opus and FLAC, MP3, AIFF, AU,
CAF, W64 and NIST SPHERE; MP4/M4A, WebM, AAC and others are decoded where torchcodec and FFmpeg's libraries are there.
Everything that cannot be used is an AudioError whose reason names the format that was found.

Rules: channels are averaged; sampling rates outside 4 to 384 kHz, clips without samples, and clips with a NaN, an Inf
or a peak above 8 are refused; of a file that is cut short the readable part is used, and a note says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import soundfile

from clap_zero.audio import ffmpeg
from clap_zero.audio.headers import corrected
from clap_zero.audio.in_memory import open_sound
from clap_zero.audio.kinds import FFMPEG_KINDS, OTHER_KINDS, SOUNDFILE_KINDS, AudioError, find_kind
from clap_zero.audio.mp3 import with_true_length
from clap_zero.audio.sound import DecodedAudio, Part, check_rate
from clap_zero.audio.waveform import mix_down, resample

__all__ = ["AudioError", "decode", "load_clip"]

MAX_PEAK = 8.0
"""18 dB over full scale. Float files of another scale hold up to 32,768 by mistake: clipped, they would be noise."""

_BLOCK_SAMPLES = 16_384
"""Samples (all channels) of one read: what one decoder error costs, and the most memory beside the result."""

_MAX_SCAN_SAMPLES = 2**27
"""Most samples (all channels) decoded to find the length of a file whose header is wrong: 23 min of 48 kHz stereo."""

UNKNOWN_FRAMES = 2**62
"""libsndfile announces 2**63 - 1 frames where a FLAC header leaves the number open."""


def decode(
    data: bytes,
    *,
    start_s: float = 0.0,
    duration_s: float | None = None,
    max_seconds: float,
    rng: np.random.Generator | None = None,
) -> DecodedAudio:
    """Decodes part of an audio file; only that part where the format can seek.

    Args:
        data: The whole file.
        start_s: Where the part starts.
        duration_s: Its length; None: to the end.
        max_seconds: Most seconds that are decoded, whatever duration_s says.
        rng: Draws the start uniformly instead, from all that leave a full part (a shorter clip is taken whole).

    Raises:
        AudioError: The clip cannot be used; the reason is one line.
    """
    if not data:
        raise AudioError("empty file (0 bytes)")
    assert max_seconds > 0 and start_s >= 0 and (rng is None or start_s == 0), (max_seconds, start_s)
    part = Part(start_s, max_seconds if duration_s is None else min(duration_s, max_seconds), rng)
    kind = find_kind(data)
    if kind in OTHER_KINDS:
        raise AudioError(f"found {kind} and no audio")
    if kind in FFMPEG_KINDS:
        return _checked(ffmpeg.decode_with_ffmpeg(data, kind, part))
    try:
        return _checked(_decode_with_soundfile(data, kind, part))
    except soundfile.LibsndfileError as error:
        if ffmpeg.problem() is not None:
            found = f"{kind} cannot be decoded" if kind in SOUNDFILE_KINDS else f"found {kind}"
            raise AudioError(f"{found}: {_message(error)}") from error
        return _checked(ffmpeg.decode_with_ffmpeg(data, kind, part))


def load_clip(
    data: bytes,
    *,
    max_seconds: float,
    sample_rate_hz: int = 48_000,
    rng: np.random.Generator | None = None,
    notes: list[str] | None = None,
) -> np.ndarray:
    """Decodes, mixes to mono and resamples the first max_seconds of a file, or a part that `rng` draws.

    Args:
        data: The whole file.
        max_seconds: Longest part that is decoded.
        sample_rate_hz: Rate wanted.
        rng: Draws the part of a longer file.
        notes: Gets a line where the file is damaged and its readable part is used; the caller knows the key.

    Returns:
        float32 (n,), 1 <= n <= max_seconds * sample_rate_hz.

    Raises:
        AudioError: The clip cannot be used; the reason is one line.
    """
    audio = decode(data, max_seconds=max_seconds, rng=rng)
    if audio.note is not None and notes is not None:
        notes.append(audio.note)
    samples = resample(audio.samples, audio.sample_rate_hz, sample_rate_hz)
    return samples[: max(1, round(max_seconds * sample_rate_hz))]


def _checked(audio: DecodedAudio) -> DecodedAudio:
    """The audio, or an AudioError if its samples are none, not finite or of another scale."""
    if audio.samples.size == 0:
        raise AudioError(f"{audio.kind} holds no samples in the part wanted")
    peak = float(np.abs(audio.samples).max())
    if not np.isfinite(peak):
        raise AudioError(f"{audio.kind} holds NaN or infinite samples")
    if peak > MAX_PEAK:
        raise AudioError(f"{audio.kind} holds samples up to {peak:.6g}, full scale is 1")
    return audio


def _message(error: soundfile.LibsndfileError) -> str:
    """libsndfile's own words, without soundfile's prefix that prints the object."""
    words = error.error_string.strip().rstrip(".")
    return "no frames were found" if words.startswith("File does not exist") else words  # of an MP3; it is in memory


def _decode_with_soundfile(data: bytes, kind: str, part: Part) -> DecodedAudio:
    note = None
    if kind == "MP3":
        mp3 = with_true_length(data)
        if mp3 is not None:
            data, note = mp3.data, mp3.note
    else:
        data, note = corrected(data, kind) or (data, None)
    with open_sound(data) as file:
        check_rate(file.samplerate, kind)
        rate_hz, announced = file.samplerate, file.frames
        audio = DecodedAudio(np.zeros(0, np.float32), rate_hz, kind, file.channels, note)
        if announced <= 0:
            raise AudioError(f"{kind} holds no samples")
        start, wanted = part.place(announced, rate_hz)
        problem = None
        if announced < UNKNOWN_FRAMES or part.rng is None:
            samples, problem = _read(file, start, wanted, seek=kind != "MP3")
        if problem is None and announced < UNKNOWN_FRAMES and samples.size == wanted:
            return replace(audio, samples=samples)
        if start == 0 and part.rng is None:
            return replace(audio, samples=samples, note=_damage(samples.size, audio, announced, problem))
    return _decode_damaged(data, audio, part)


def _damage(num_readable: int, audio: DecodedAudio, announced: int, problem: str | None) -> str | None:
    if announced >= UNKNOWN_FRAMES or (problem is None and num_readable >= announced):
        # A stream written to a pipe ends where it ends, and libsndfile complains at the end of every one. And some
        # codecs can only be read from the start.
        return audio.note
    reason = f" ({problem})" if problem else ""
    return f"{audio.kind} is damaged or cut short: readable to {num_readable / audio.sample_rate_hz:.2f} s{reason}"


def _blocks(file: soundfile.SoundFile, num_frames: int, problems: list[str]) -> Iterator[np.ndarray]:
    """Yields up to `num_frames` frames from where the file stands, in blocks (n, channels).

    A header that claims hours costs no memory so. If the decoder gives up, its complaint goes into `problems`, and what
    it had decoded of the block comes still: the NaN that it left in place tell how much that is.
    """
    size = max(256, _BLOCK_SAMPLES // file.channels)
    while num_frames > 0:
        buffer = np.full((min(size, num_frames), file.channels), np.nan, dtype=np.float32)
        try:
            block = file.read(out=buffer)
        except soundfile.LibsndfileError as error:
            problems.append(_message(error))
            untouched = np.isnan(buffer[:, 0])
            yield buffer[: int(untouched.argmax()) if untouched.any() else None]
            return
        if block.shape[0] == 0:
            return
        yield block
        num_frames -= block.shape[0]


def _read(file: soundfile.SoundFile, start: int, wanted: int, *, seek: bool = True) -> tuple[np.ndarray, str | None]:
    """Up to `wanted` frames from `start` on, mixed to mono, and the decoder's complaint if it stopped early.

    Without `seek` the frames before `start` are decoded and dropped.
    """
    problems: list[str] = []
    if start and seek:
        try:
            file.seek(start)
        except soundfile.LibsndfileError as error:
            return np.zeros(0, dtype=np.float32), _message(error)
    elif start:
        for _ in _blocks(file, start, problems):
            pass
    mono = [np.zeros(0, dtype=np.float32)]
    if not problems:
        mono += [mix_down(block) for block in _blocks(file, wanted, problems)]
    return np.concatenate(mono), problems[0] if problems else None


def _decode_damaged(data: bytes, audio: DecodedAudio, part: Part) -> DecodedAudio:
    """Counts the frames that can be read from the start, then takes the part out of those without seeking."""
    num_frames, problem = _count_readable(data)
    start, wanted = part.place(num_frames, audio.sample_rate_hz)
    with open_sound(data) as file:
        samples, _ = _read(file, start, wanted, seek=False)
        announced = file.frames
    return replace(audio, samples=samples, note=_damage(num_frames, audio, announced, problem))


def _count_readable(data: bytes) -> tuple[int, str | None]:
    problems: list[str] = []
    with open_sound(data) as file:
        most = _MAX_SCAN_SAMPLES // file.channels
        num_frames = sum(block.shape[0] for block in _blocks(file, most, problems))
    return num_frames, problems[0] if problems else None
