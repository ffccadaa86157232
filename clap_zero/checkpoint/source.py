"""Where a trained model is: a run, a checkpoint in it, or a Hugging Face directory; and what goes with its weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import yaml
from pydantic import ValidationError

from clap_zero.audio.features import FeatureConfig
from clap_zero.checkpoint.manifest import MANIFEST, read_manifest
from clap_zero.checkpoint.store import CheckpointStore
from clap_zero.config.schema import RunConfig
from clap_zero.errors import CheckpointError
from clap_zero.model.features import feature_config

TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "merges.txt")


@dataclass(frozen=True)
class ModelSource:
    """A trained model and what it takes.

    Attributes:
        weights: Directory with config.json and the weight files.
        features: The log-mel that it was trained on.
        tokenizer: Directory with its tokenizer's files, None for the embedded RoBERTa vocabulary.
        max_caption_tokens: Longest caption, special tokens included.
        max_seconds: Longest part of a clip that is decoded.
        run: The configuration of its run, None for a Hugging Face directory.
        step: Optimizer steps of its checkpoint, None for a Hugging Face directory.
    """

    weights: Path
    features: FeatureConfig
    tokenizer: Path | None
    max_caption_tokens: int
    max_seconds: float
    run: RunConfig | None
    step: int | None


def find_model(path: str | Path, *, step: str | int = "latest") -> ModelSource:
    """Finds the weights at a path and what goes with them.

    Args:
        path: A run directory, a checkpoint in it, or a Hugging Face directory.
        step: For a run: `latest`, `best` or a step.

    Raises:
        CheckpointError: There is no usable model.
    """
    path = Path(path).expanduser()
    if not path.is_dir():
        raise CheckpointError(f"there is no directory {path}")
    if (path / MANIFEST).is_file():
        weights = CheckpointStore(path.parent).resolve(path)
        assert weights is not None
        return _of_checkpoint(weights, path.parent.parent)
    if (path / "checkpoints").is_dir():
        weights = CheckpointStore(path / "checkpoints").resolve(step)
        assert weights is not None
        return _of_checkpoint(weights, path)
    if (path / "config.json").is_file():
        return _of_directory(path)
    raise CheckpointError(
        f"{path} is neither a run (it has no checkpoints directory: nothing was saved yet?) nor a model's directory "
        "(it has no config.json)"
    )


def read_run_config(run_dir: Path) -> RunConfig | None:
    """The configuration recorded in a run directory, None where there is none.

    Raises:
        CheckpointError: It cannot be read.
    """
    file = run_dir / "config.yaml"
    try:
        return RunConfig.model_validate(yaml.safe_load(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, yaml.YAMLError, ValidationError) as error:
        raise CheckpointError(f"{file} is not the configuration of a run: {' '.join(str(error).split())}") from error


def read_model_config(directory: Path) -> dict:
    """config.json of a CLAP model.

    Raises:
        CheckpointError: It is missing, broken, or another model's.
    """
    file = directory / "config.json"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read ({error})") from error
    if content.get("model_type") != "clap":
        raise CheckpointError(f"{file} describes a model of type {content.get('model_type')!r}, not 'clap'")
    return content


def _features(directory: Path, pretrained: str | None, truncation: str) -> FeatureConfig:
    from transformers import ClapConfig

    return feature_config(ClapConfig.from_dict(read_model_config(directory)), pretrained, truncation)


def _of_checkpoint(weights: Path, run_dir: Path) -> ModelSource:
    run = read_run_config(run_dir)
    pretrained = None if run is None else run.model.pretrained
    directory = None
    if pretrained is not None:
        from clap_zero.model.pretrained import resolve_pretrained

        directory = resolve_pretrained(pretrained)
    return ModelSource(
        weights=weights,
        features=_features(weights, pretrained, "auto" if run is None else run.data.truncation),
        tokenizer=tokenizer_directory(directory),
        max_caption_tokens=77 if run is None else run.data.max_caption_tokens,
        max_seconds=60.0 if run is None else run.data.max_seconds,
        run=run,
        step=int(read_manifest(weights)["step"]),
    )


def _of_directory(path: Path) -> ModelSource:
    return ModelSource(
        weights=path,
        features=_features(path, str(path), "auto"),
        tokenizer=tokenizer_directory(path),
        max_caption_tokens=_model_max_length(path),
        max_seconds=60.0,
        run=None,
        step=None,
    )


def tokenizer_directory(path: Path | None) -> Path | None:
    """The path if it holds a tokenizer's files, else None: the embedded vocabulary."""
    if path is None:
        return None
    whole, vocab, merges = (path / name for name in TOKENIZER_FILES)
    return path if whole.is_file() or (vocab.is_file() and merges.is_file()) else None


def _model_max_length(path: Path) -> int:
    """The longest caption that a Hugging Face directory names, at most the 512 that RoBERTa can take."""
    try:
        length = json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8")).get("model_max_length", 512)
    except (OSError, ValueError):
        return 512
    return int(min(length, 512))
