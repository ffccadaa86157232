"""Named starting points: a model's geometry, the values recommended for training it, and what it needs of memory."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from clap_zero.config.values import parse_yaml

FINE_TUNING = "pretrained"
"""Name of the file with the values recommended for a pretrained model; it has no geometry."""
EMBEDDING_DIM = 512
"""Width of the common space in LAION's models."""


@dataclass(frozen=True)
class Preset:
    """A preset file.

    Attributes:
        model: keyword arguments of transformers' ClapConfig; empty for a pretrained model.
        run: dotted keys of the run config and the recommended value of each.
        global_batch_size: pairs per optimizer step that "auto" aims at.
        num_parameters: of the model; for a pretrained one that of LAION's models of the usual size.
        bytes_per_pair: activations of one pair in fp32, 77 tokens, without activation checkpointing.
        bytes_per_pair_checkpointed: the same with activation checkpointing on both towers.
    """

    model: dict[str, Any]
    run: dict[str, Any]
    global_batch_size: int
    num_parameters: int
    bytes_per_pair: int
    bytes_per_pair_checkpointed: int

    @property
    def embedding_dim(self) -> int:
        """Width of the common space of clips and captions."""
        return int(self.model.get("projection_dim", EMBEDDING_DIM))


@functools.cache
def load_preset(name: str | None) -> Preset:
    """The preset of that name; None gives the one for pretrained models. Treat what it holds as read-only."""
    text = resources.files("clap_zero.config").joinpath("presets", f"{name or FINE_TUNING}.yaml").read_text("utf-8")
    content = parse_yaml(text)
    run = {f"{section}.{key}": value for section, keys in content["run"].items() for key, value in keys.items()}
    return Preset(model=content.get("model", {}), run=run, **content["batch"])


def fuses(preset: str | None, *, pretrained: str | None) -> bool:
    """Whether the model takes a clip as four views.

    Weights say it in the config.json beside them. That of a name on the hub is not read here: the larger is taken.
    """
    if preset is not None:
        return bool(load_preset(preset).model.get("audio_config", {}).get("enable_fusion"))
    try:
        config = json.loads((Path(str(pretrained)).expanduser() / "config.json").read_text("utf-8"))
        return bool(config.get("audio_config", {}).get("enable_fusion", False))
    except (OSError, ValueError, AttributeError):
        return True
