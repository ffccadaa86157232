"""Vectors from a trained model: `clap_zero.load(DIR).embed_audio([...])` and `.embed_text([...])`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from clap_zero.audio.decode import AudioError, load_clip
from clap_zero.audio.features import ClapFeatures, ClipBatch
from clap_zero.audio.waveform import from_int16, mix_down, resample
from clap_zero.checkpoint.source import ModelSource, find_model
from clap_zero.data.text import Tokenizer
from clap_zero.errors import DataError
from clap_zero.model.clap import ClapForContrast

BATCH_SIZE = 16

Item = TypeVar("Item")
Clip = str | Path | bytes | np.ndarray | Tensor


class ClapEmbedder:
    """Turns sounds and texts into vectors of one space. Nothing in it is random.

    A clip's vector does not depend on what else is in the call (up to rounding, below 1e-5), and clips are treated as
    in the evaluation of a run: mono at the model's rate, 16-bit round trip; of the first `max_seconds`
    of a clip longer than 10 s the centre (for models with fusion: the whole and the middle of each third).

    Attributes:
        dimension: Width d of the vectors.
        sample_rate_hz: Rate that arrays are taken to have unless another is given.
        logit_scale: The factor on cosine similarities that the model was trained with.
        logit_bias: What the sigmoid objective adds to them, None for models that were not trained with it.
    """

    def __init__(self, model: ClapForContrast, source: ModelSource, *, device: torch.device) -> None:
        """Args:
        model: The model on the device.
        source: What goes with its weights.
        device: Where it computes.
        """
        self._model = model.eval().requires_grad_(False)
        self._source = source
        self._device = device
        self._features = ClapFeatures(source.features, device=device)
        self._tokenizer = Tokenizer(source.tokenizer)
        self.dimension = int(model.config.projection_dim)
        self.sample_rate_hz = source.features.sample_rate_hz
        with torch.no_grad():
            output = model()
        self.logit_scale = float(output.logit_scale)
        self.logit_bias = None if output.logit_bias is None else float(output.logit_bias)

    def embed_audio(
        self, clips: Clip | Sequence[Clip], *, sample_rate_hz: int | None = None, batch_size: int = BATCH_SIZE
    ) -> np.ndarray:
        """Embeds sounds.

        Args:
            clips: Paths, contents of audio files, or waveforms (samples,) or (samples, channels), float in [-1, 1] or
                int16; or one of them.
            sample_rate_hz: Rate of the waveforms; files know their own.
            batch_size: Clips in one forward; only speed and memory depend on it.

        Returns:
            (number of clips, d) float32, rows of length 1.

        Raises:
            DataError: A clip cannot be read; the message names it.
        """
        if isinstance(clips, (str, Path, bytes, np.ndarray, Tensor)):
            clips = [clips]
        rows = [np.empty((0, self.dimension), dtype=np.float32)]
        with torch.no_grad():
            for part in _parts(clips, batch_size):
                waves = [self._wave(clip, sample_rate_hz, f"clip {number}") for number, clip in part]
                batch = ClipBatch.from_clips(waves, self._source.features)
                input_features, is_longer = self._features(batch)
                rows.append(_rows(self._model(input_features=input_features, is_longer=is_longer).audio_embeds))
        return np.concatenate(rows)

    def embed_text(self, texts: str | Sequence[str], *, batch_size: int = 4 * BATCH_SIZE) -> np.ndarray:
        """Embeds texts; those beyond the longest caption of the training are cut.

        Args:
            texts: Texts, or one.
            batch_size: Texts in one forward; only speed and memory depend on it.

        Returns:
            (number of texts, d) float32, rows of length 1.

        Raises:
            DataError: Something is not a text.
        """
        texts = [texts] if isinstance(texts, str) else list(texts)
        wrong = next((number for number, text in enumerate(texts) if not isinstance(text, str)), None)
        if wrong is not None:
            raise DataError(f"text {wrong} is {type(texts[wrong]).__name__}, not a string")
        rows = [np.empty((0, self.dimension), dtype=np.float32)]
        with torch.no_grad():
            for part in _parts(texts, batch_size):
                ids, mask = self._tokenizer([text for _, text in part], self._source.max_caption_tokens)
                output = self._model(input_ids=ids.to(self._device), attention_mask=mask.to(self._device))
                rows.append(_rows(output.text_embeds))
        return np.concatenate(rows)

    def _wave(self, clip: Clip, sample_rate_hz: int | None, name: str) -> np.ndarray:
        """(samples,) float32 at the model's rate."""
        if isinstance(clip, (str, Path)):
            name = str(clip)
            try:
                clip = Path(clip).expanduser().read_bytes()
            except OSError as error:
                raise DataError(f"{name}: {error.strerror}") from error
        try:
            if isinstance(clip, bytes):
                limit, rate = self._source.max_seconds, self.sample_rate_hz
                return load_clip(clip, max_seconds=limit, sample_rate_hz=rate)
            return self._from_array(clip, sample_rate_hz or self.sample_rate_hz)
        except (AudioError, ValueError) as error:
            raise DataError(f"{name}: {error}") from error

    def _from_array(self, samples: np.ndarray | Tensor, rate_hz: int) -> np.ndarray:
        if isinstance(samples, Tensor):
            samples = samples.detach().cpu().numpy()
        if not isinstance(samples, np.ndarray) or samples.ndim not in (1, 2) or samples.size == 0:
            raise ValueError("a waveform is a non-empty array (samples,) or (samples, channels)")
        if samples.ndim == 2 and samples.shape[1] > samples.shape[0]:
            raise ValueError(f"a waveform of shape {samples.shape} has more channels than samples: transpose it")
        samples = samples[: int(self._source.max_seconds * rate_hz)]
        if samples.dtype == np.int16:
            samples = from_int16(samples)
        if not np.issubdtype(samples.dtype, np.floating):
            raise ValueError(f"a waveform is float in [-1, 1] or int16, not {samples.dtype}")
        if not np.isfinite(samples).all():
            raise ValueError("the waveform holds numbers that are not finite")
        return resample(mix_down(samples), rate_hz, self.sample_rate_hz)


def load(
    dir_or_run: str | Path, *, device: str | torch.device | None = None, step: str | int = "latest"
) -> ClapEmbedder:
    """Loads a trained model for inference.

    Args:
        dir_or_run: An exported directory, any Hugging Face CLAP directory, a run, or a checkpoint in it.
        device: Where to compute; a GPU if there is one.
        step: For a run: `latest`, `best` or a step.

    Raises:
        CheckpointError: There is no usable model.
    """
    source = find_model(dir_or_run, step=step)
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return ClapEmbedder(source.build(where), source, device=where)


def _parts(items: Sequence[Item], size: int) -> Iterator[list[tuple[int, Item]]]:
    numbered = list(enumerate(items))
    for first in range(0, len(numbered), size):
        yield numbered[first : first + size]


def _rows(embeds: Tensor | None) -> np.ndarray:
    assert embeds is not None
    return embeds.float().cpu().numpy()
