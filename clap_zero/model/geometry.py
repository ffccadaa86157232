"""A model's geometry: from a preset's nested dict to a ClapConfig that is known to work."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import ClapAudioConfig, ClapConfig, ClapTextConfig

from clap_zero.errors import ConfigError

_SECTIONS = {"audio_config": ClapAudioConfig, "text_config": ClapTextConfig}


def clap_config(geometry: Mapping[str, Any]) -> ClapConfig:
    """Builds and checks the configuration of a model from scratch.

    Args:
        geometry: ClapConfig's keyword arguments, with `audio_config` and `text_config` as dicts.

    Raises:
        ConfigError: A key is unknown, a value has the wrong type, or the towers do not fit together.
    """
    _refuse_unknown(geometry, ClapConfig, where="model geometry")
    for section, kind in _SECTIONS.items():
        _refuse_unknown(geometry.get(section) or {}, kind, where=f"model geometry, {section}")
    try:
        config = ClapConfig(**{key: dict(value) if key in _SECTIONS else value for key, value in geometry.items()})
    except (StrictDataclassError, TypeError, ValueError) as error:
        raise ConfigError(f"model geometry: {' '.join(str(error).split())}") from error
    check_geometry(config)
    return config


def _refuse_unknown(values: Mapping[str, Any], kind: type, *, where: str) -> None:
    """transformers takes any key as an attribute that nobody reads; a typo would train another model."""
    known = [name for name in vars(kind)["__dataclass_fields__"] if not name.startswith("_")]
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{where}: unknown key {key!r}{hint}")


def check_geometry(config: ClapConfig) -> None:
    """Refuses what would crash deep inside the towers.

    Raises:
        ConfigError: With the numbers and the way out.
    """
    audio, text = config.audio_config, config.text_config
    num_stages = len(audio.depths)
    stride = audio.patch_stride if isinstance(audio.patch_stride, int) else max(audio.patch_stride)
    if len(audio.num_attention_heads) != num_stages:
        raise ConfigError(
            f"audio_config: depths has {num_stages} stages and num_attention_heads {len(audio.num_attention_heads)}"
        )
    smallest = audio.spec_size // stride // 2 ** (num_stages - 1)
    if smallest < audio.window_size:
        raise ConfigError(
            f"audio_config: the last of {num_stages} stages is {smallest} patches wide (spec_size {audio.spec_size} / "
            f"patch_stride {stride} / 2^{num_stages - 1}), smaller than window_size {audio.window_size}: take fewer "
            "stages, a smaller patch_stride or a larger spec_size"
        )
    width = audio.patch_embeds_hidden_size * 2 ** (num_stages - 1)
    if audio.hidden_size != width:
        raise ConfigError(
            f"audio_config: hidden_size is {audio.hidden_size}, but the last stage is patch_embeds_hidden_size * "
            f"2^{num_stages - 1} = {width} wide: set hidden_size to {width}"
        )
    for stage, heads in enumerate(audio.num_attention_heads):
        stage_width = audio.patch_embeds_hidden_size * 2**stage
        if stage_width % heads:
            raise ConfigError(f"audio_config: stage {stage} is {stage_width} wide, not a multiple of its {heads} heads")
    if text.hidden_size % text.num_attention_heads:
        raise ConfigError(
            f"text_config: hidden_size {text.hidden_size} is not a multiple of num_attention_heads "
            f"{text.num_attention_heads}"
        )
    if audio.spec_size % audio.num_mel_bins:
        raise ConfigError(
            f"audio_config: spec_size {audio.spec_size} is not a multiple of num_mel_bins {audio.num_mel_bins}"
        )
    if audio.enable_fusion and audio.fusion_type == "channel_map":
        raise ConfigError("audio_config: fusion_type 'channel_map' does not run in transformers: use 'aff_2d'")


def override_dropout(config: ClapConfig, probability: float) -> None:
    """Sets every dropout of both towers: hidden, attention, and the audio tower's drop path.

    Drop path grows linearly from 0 in the first block to `probability` in the last, as always in HTSAT.

    Args:
        config: Changed in place, so that it is also what is saved beside the weights.
        probability: 0 <= probability < 1.

    Raises:
        ConfigError: The probability is out of range.
    """
    if not 0 <= probability < 1:
        raise ConfigError(f"model.dropout is {probability}: it must be at least 0 and less than 1")
    for section in (config.audio_config, config.text_config):
        section.hidden_dropout_prob = probability
        section.attention_probs_dropout_prob = probability
    config.audio_config.drop_path_rate = probability
