"""Where a trained model is: a run, a checkpoint in it, or a Hugging Face directory; and what goes with its weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from clap_zero.audio.features import FeatureConfig
from clap_zero.checkpoint.manifest import MANIFEST, read_manifest
from clap_zero.checkpoint.store import CheckpointStore
from clap_zero.config.load import run_config_from_file
from clap_zero.config.schema import RunConfig
from clap_zero.errors import CheckpointError, ConfigError
from clap_zero.model.clap import ClapForContrast, Parts, build_model
from clap_zero.model.features import PREPROCESSOR_FILE, feature_config
from clap_zero.model.pretrained import read_config

TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "merges.txt", "special_tokens_map.json")


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
        run_dir: The directory of its run, None for a Hugging Face directory.
        step: Optimizer steps of its checkpoint, None for a Hugging Face directory.
    """

    weights: Path
    features: FeatureConfig
    tokenizer: Path | None
    max_caption_tokens: int
    max_seconds: float
    run: RunConfig | None
    run_dir: Path | None
    step: int | None

    def build(self, device: torch.device) -> ClapForContrast:
        """The model on a device, in training mode, with BatchNorm frozen.

        Raises:
            CheckpointError: The weights do not fit the configuration beside them.
        """
        return build_model(
            geometry=None,
            pretrained=str(self.weights),
            batch_norm="frozen",
            dropout=None,
            seed=0,
            ds_config={},
            device=device,
            parts=Parts(bias=None, mlp="auto"),
        )


def companions(features: FeatureConfig, tokenizer: Path | None) -> dict[str, bytes]:
    """What a checkpoint holds beside the weights, so that it needs no other directory.

    Args:
        features: The log-mel that the model is trained on.
        tokenizer: Directory with the tokenizer's files, None for the embedded RoBERTa vocabulary.

    Returns:
        Contents by file name.
    """
    files = {PREPROCESSOR_FILE: (json.dumps(features.to_preprocessor(), indent=2) + "\n").encode()}
    if tokenizer is not None:
        files |= {name: (tokenizer / name).read_bytes() for name in TOKENIZER_FILES if (tokenizer / name).is_file()}
    return files


def find_model(path: str | Path, *, step: str | int = "latest") -> ModelSource:
    """Finds the weights at a path and what goes with them.

    Args:
        path: A run directory, a checkpoint in it, or a Hugging Face directory.
        step: For a run: `latest`, `best` or a step.

    Raises:
        CheckpointError: There is no usable model, or a step is wanted of what is one checkpoint.
    """
    path = Path(path).expanduser()
    if not path.is_dir():
        raise CheckpointError(f"there is no directory {path}")
    if (path / MANIFEST).is_file():
        path = path.resolve()  # the run is above it, also where the path is `.`
        if step != "latest":
            raise CheckpointError(f"{path} is one checkpoint: give the run {path.parent.parent} to choose step {step}")
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
    if not file.is_file():
        return None
    try:
        return run_config_from_file(str(file))
    except ConfigError as error:
        raise CheckpointError(f"{file} is not the configuration of a run: {' '.join(str(error).split())}") from error


def _of_checkpoint(weights: Path, run_dir: Path) -> ModelSource:
    run = read_run_config(run_dir)
    if run is not None and run.model.pretrained is not None and not (weights / PREPROCESSOR_FILE).is_file():
        raise CheckpointError(
            f"checkpoint {weights} has no {PREPROCESSOR_FILE}, and its run began from {run.model.pretrained}, which "
            "may have features and a vocabulary of its own: put that file and the tokenizer's files into a directory "
            "with the weights and config.json of the checkpoint, and give that directory"
        )
    return ModelSource(
        weights=weights,
        features=feature_config(read_config(weights), weights, "auto" if run is None else run.data.truncation),
        tokenizer=tokenizer_directory(weights),
        max_caption_tokens=77 if run is None else run.data.max_caption_tokens,
        max_seconds=60.0 if run is None else run.data.max_seconds,
        run=run,
        run_dir=run_dir,
        step=int(read_manifest(weights)["step"]),
    )


def _of_directory(path: Path) -> ModelSource:
    return ModelSource(
        weights=path,
        features=feature_config(read_config(path), path),
        tokenizer=tokenizer_directory(path),
        max_caption_tokens=_model_max_length(path),
        max_seconds=60.0,
        run=None,
        run_dir=None,
        step=None,
    )


def tokenizer_directory(path: Path | None) -> Path | None:
    """The path if it holds a tokenizer's files, else None: the embedded vocabulary."""
    if path is None:
        return None
    whole, vocab, merges = (path / name for name in TOKENIZER_FILES[:3])
    return path if whole.is_file() or (vocab.is_file() and merges.is_file()) else None


def _model_max_length(path: Path) -> int:
    """The longest caption that a Hugging Face directory names, at most the 512 that RoBERTa can take."""
    try:
        length = json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8")).get("model_max_length", 512)
    except (OSError, ValueError):
        return 512
    return int(min(length, 512))
