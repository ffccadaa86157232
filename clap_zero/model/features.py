"""Which log-mel a model was trained with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import ClapConfig

from clap_zero.audio.features import FeatureConfig
from clap_zero.errors import CheckpointError, ConfigError

_KEYS = {
    "sample_rate_hz": "sampling_rate",
    "n_fft": "fft_window_size",
    "hop": "hop_length",
    "num_mels": "feature_size",
    "f_min": "frequency_min",
    "f_max": "frequency_max",
    "max_samples": "nb_max_samples",
}
"""Our name of a value and its name in preprocessor_config.json."""


def feature_config(
    model_config: ClapConfig, pretrained: str | Path | None = None, truncation: str = "auto"
) -> FeatureConfig:
    """The features that a model takes.

    Args:
        model_config: The model's configuration.
        pretrained: Directory (or hub name) of the weights; its preprocessor_config.json is followed if there is one.
        truncation: "auto": fusion if and only if the model fuses; "rand_trunc"; "fusion".

    Raises:
        ConfigError: The truncation does not fit the model.
        CheckpointError: preprocessor_config.json does not fit the model.
    """
    audio = model_config.audio_config
    if truncation == "auto":
        truncation = "fusion" if audio.enable_fusion else "rand_trunc"
    if truncation == "fusion" and not audio.enable_fusion:
        raise ConfigError(
            "data.truncation is 'fusion', but the model has no fusion (audio_config.enable_fusion is false): use "
            "'rand_trunc', or a model with fusion such as the preset htsat-fused"
        )
    values = {} if pretrained is None else _preprocessor_values(pretrained)
    num_mels = values.setdefault("num_mels", audio.num_mel_bins)
    if num_mels != audio.num_mel_bins:
        raise CheckpointError(
            f"{pretrained}: preprocessor_config.json has feature_size {num_mels}, but the model takes "
            f"{audio.num_mel_bins} mel bands (audio_config.num_mel_bins)"
        )
    defaults = FeatureConfig(truncation)
    max_samples, hop = values.get("max_samples", defaults.max_samples), values.get("hop", defaults.hop)
    return FeatureConfig(truncation, **values, chunk_frames=max_samples // hop + 1)


def _preprocessor_values(pretrained: str | Path) -> dict[str, Any]:
    """The values of preprocessor_config.json under our names; without the file, or a value, our defaults stand."""
    # At call time: pretrained imports the hub client, which the features of a preset do not need.
    from clap_zero.model.pretrained import resolve_pretrained

    path = resolve_pretrained(str(pretrained)) / "preprocessor_config.json"
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON ({error})") from error
    values = {ours: content[theirs] for ours, theirs in _KEYS.items() if theirs in content}
    if "max_samples" not in values and {"max_length_s", "sampling_rate"} <= content.keys():
        values["max_samples"] = int(content["max_length_s"] * content["sampling_rate"])
    return values
