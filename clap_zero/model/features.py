"""Which log-mel a model was trained with."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Literal

from transformers import ClapConfig

from clap_zero.audio.features import FeatureConfig
from clap_zero.errors import CheckpointError, ConfigError

PREPROCESSOR_FILE = "preprocessor_config.json"


Truncation = Literal["rand_trunc", "fusion"]


def feature_config(
    model_config: ClapConfig, pretrained: str | Path | None = None, truncation: str = "auto"
) -> FeatureConfig:
    """The features that a model takes.

    Args:
        model_config: The model's configuration.
        pretrained: Directory (or hub name) of the weights; its preprocessor_config.json is followed if there is one,
            but for its truncation.
        truncation: "auto": fusion if and only if the model fuses; "rand_trunc"; "fusion".

    Raises:
        ConfigError: The truncation does not fit the model.
        CheckpointError: preprocessor_config.json cannot be used or does not fit the model.
    """
    audio = model_config.audio_config
    if truncation == "auto":
        truncation = "fusion" if audio.enable_fusion else "rand_trunc"
    if truncation == "fusion" and not audio.enable_fusion:
        raise ConfigError(
            "data.truncation is 'fusion', but the model has no fusion (audio_config.enable_fusion is false): use "
            "'rand_trunc', or a model with fusion such as the preset htsat-fused"
        )
    if truncation != "fusion" and audio.enable_fusion:
        # It trains, but Hugging Face's classes give an exported model one mel where it was never trained on one, or
        # mark its clips as longer than they were taken for.
        raise ConfigError(
            f"data.truncation is {truncation!r}, but the model has fusion (audio_config.enable_fusion is true): use "
            "'fusion', or a model without fusion such as the preset htsat-unfused"
        )
    mode: Truncation = "fusion" if truncation == "fusion" else "rand_trunc"
    if pretrained is None:
        return replace(FeatureConfig(mode), num_mels=audio.num_mel_bins)
    return _of_directory(pretrained, truncation=mode, num_mels=audio.num_mel_bins)


def _of_directory(pretrained: str | Path, *, truncation: Truncation, num_mels: int) -> FeatureConfig:
    """What preprocessor_config.json says; without the file our defaults stand."""
    # At call time: pretrained imports the hub client, which the features of a preset do not need.
    from clap_zero.model.pretrained import resolve_pretrained

    path = resolve_pretrained(str(pretrained)) / PREPROCESSOR_FILE
    if not path.is_file():
        return replace(FeatureConfig(truncation), num_mels=num_mels)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        features = FeatureConfig.from_preprocessor({**content, "truncation": truncation})
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror})") from error
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error})") from error
    except ConfigError as error:
        raise CheckpointError(f"{path.parent}: {error}") from error
    if features.num_mels != num_mels:
        raise CheckpointError(
            f"{path} has feature_size {features.num_mels}, but the model takes {num_mels} mel bands "
            "(audio_config.num_mel_bins)"
        )
    return features
