"""Weights from a Hugging Face directory or hub name, tensor by tensor, into whole or partitioned parameters."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import ClapConfig, ClapModel

from clap_zero.distributed.collectives import rank_and_size
from clap_zero.errors import CheckpointError, ConfigError
from clap_zero.model import logit_bias, mlp_heads
from clap_zero.model.initial import whole

_log = logging.getLogger(__name__)

OPTIONAL_BUFFER = "text_model.embeddings.position_ids"
"""Only counts 0, 1, 2...: library versions differ in whether they store it."""

_SCALES = ("logit_scale_a", "logit_scale_t")
_DESCRIPTIONS = ["*.json", "*.txt"]
_WEIGHTS = ["model*.safetensors", mlp_heads.FILE]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, not yet read.

    Attributes:
        shape: Its shape.
        read: Reads it into memory.
        path: The file it is in.
    """

    shape: tuple[int, ...]
    read: Callable[[], Tensor]
    path: Path


def resolve_pretrained(name_or_directory: str) -> Path:
    """The directory of pretrained weights; a hub name is downloaded (or found in the hub's cache).

    Raises:
        ConfigError: It is neither a directory nor a name that can be fetched.
    """
    directory = Path(name_or_directory).expanduser()
    if directory.is_dir():
        return directory
    if directory.exists():
        raise ConfigError(
            f"model.pretrained {name_or_directory!r} is a file, needed is the directory of a Hugging Face ClapModel; "
            "the hub has LAION's as such (laion/clap-htsat-unfused), other checkpoints have to be converted first"
        )
    if name_or_directory.startswith(("/", "./", "../", "~")) or name_or_directory.count("/") > 1:
        raise ConfigError(f"model.pretrained {name_or_directory!r} is not a directory here: check the path")
    try:
        found = Path(snapshot_download(name_or_directory, allow_patterns=[*_DESCRIPTIONS, *_WEIGHTS]))
        if not _weight_files(found):
            found = Path(snapshot_download(name_or_directory, allow_patterns=[*_DESCRIPTIONS, "pytorch_model*.bin"]))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ConfigError(
            f"model.pretrained {name_or_directory!r} is not a directory here, and the hub does not give it "
            f"({' '.join(str(error).split())[:200]}): check the spelling and the network, or download it first and "
            "pass the directory"
        ) from error
    return found


def read_model_config(directory: Path) -> dict[str, Any]:
    """The contents of the config.json beside a CLAP model's weights.

    Raises:
        CheckpointError: There is none, or it is not a CLAP model's.
    """
    path = directory / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        is_run = (directory / "checkpoints").is_dir()
        hint = f": it is a run, so clap-zero export {directory} DIR first, and give DIR" if is_run else ""
        raise CheckpointError(f"{directory} has no config.json, so it is not a model's directory{hint}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON ({error})") from error
    kind = content.get("model_type") if isinstance(content, dict) else None
    if kind != "clap":
        raise CheckpointError(f"{path} describes a model of type {kind!r}, needed is 'clap'")
    return content


def read_config(directory: Path) -> ClapConfig:
    """The model's configuration beside its weights. Raises as `read_model_config`, also for impossible values."""
    content = read_model_config(directory)
    try:
        return ClapConfig.from_dict(content)
    except (StrictDataclassError, TypeError, ValueError) as error:
        raise CheckpointError(f"{directory / 'config.json'}: {' '.join(str(error).split())}") from error


@torch.no_grad()
def load_pretrained(model: ClapModel, directory: Path) -> None:
    """Fills all parameters and buffers of the model. Never holds more than one tensor beside it.

    A raw logit scale beyond its bounds is stored at the bound: the model computes the same, and training can move it.
    LAION's extra heads are left out where the model has none.

    Args:
        model: Whole or partitioned (ZeRO stage 3).
        directory: With model.safetensors or pytorch_model.bin, in one file or several.

    Raises:
        CheckpointError: A file is unreadable, or a tensor is missing, left over or of another size.

    Collective at ZeRO stage 3: all ranks must call.
    """
    stored = stored_tensors(directory)
    targets = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if not any(mlp_heads.is_of_a_head(name) for name in targets):
        stored = {name: tensor for name, tensor in stored.items() if not mlp_heads.is_of_a_head(name)}
    targets.pop(logit_bias.PARAMETER, None)  # its value stands in config.json
    _check(stored, targets, directory=directory)
    rank, _ = rank_and_size()
    for name, target in targets.items():
        if name == OPTIONAL_BUFFER:
            continue
        partitioned = hasattr(target, "ds_id")
        with whole([target]) if partitioned else contextlib.nullcontext():
            if rank == 0 or not partitioned:
                value = _read(stored[name], name=name).reshape(target.shape)
                target.copy_(_bounded(value, name=name) if name in _SCALES else value)


def stores_heads(directory: Path) -> bool:
    """Whether the weights in a directory have LAION's extra heads.

    Raises:
        CheckpointError: They have a part of them, or cannot be read.
    """
    return mlp_heads.holds_heads(stored_tensors(directory).keys(), where=directory)


def _bounded(raw: Tensor, *, name: str) -> Tensor:
    """A raw logit scale within the bounds of the forward."""
    bounded = raw.clamp(0.0, math.log(100.0))
    if not torch.equal(bounded, raw):
        _log.warning("%s is %g in the weights; exp of it is held in [1, 100], so it starts at %g", name, raw, bounded)
    return bounded


def _read(tensor: StoredTensor, *, name: str) -> Tensor:
    try:
        return tensor.read()
    except (SafetensorError, OSError, RuntimeError) as error:
        raise CheckpointError(f"{tensor.path}: cannot read {name} ({error}): is the file complete?") from error


def _check(stored: dict[str, StoredTensor], targets: dict[str, Tensor], *, directory: Path) -> None:
    """Compares names and shapes.

    Raises:
        CheckpointError: Naming every tensor that does not fit.
    """
    shapes = {name: tuple(getattr(target, "ds_shape", target.shape)) for name, target in targets.items()}
    missing = sorted(shapes.keys() - stored.keys() - {OPTIONAL_BUFFER})
    left_over = sorted(stored.keys() - shapes.keys() - {OPTIONAL_BUFFER})
    other_size = sorted(
        f"{name} {list(stored[name].shape)} instead of {list(shape)}"
        for name, shape in shapes.items()
        if name in stored and name != OPTIONAL_BUFFER and not _same_shape(name, stored[name].shape, shape)
    )
    problems = [
        f"{what}: {', '.join(names)}"
        for what, names in (("missing", missing), ("not of this model", left_over), ("of another size", other_size))
        if names
    ]
    if problems:
        raise CheckpointError(f"the weights in {directory} do not fit its config.json; {'; '.join(problems)}")


def _same_shape(name: str, stored: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Equal shapes; the logit scales may be () or (1,)."""
    return stored == wanted or (name in _SCALES and stored in ((), (1,)))


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """All tensors in a directory's weight files by name, without the `module.` that a wrapper may have left.

    LAION's extra heads, from their own file or among the weights, have LAION's names.

    Raises:
        CheckpointError: There are no weights, a file cannot be read, or two hold the same tensor of a head.
    """
    files = _weight_files(directory)
    if not files:
        raise CheckpointError(f"{directory} has no weights: neither model.safetensors nor pytorch_model.bin")
    tensors: dict[str, StoredTensor] = {}
    heads = directory / mlp_heads.FILE
    for path in [*files, heads] if heads.is_file() else files:
        try:
            found = _safetensors_file(path) if path.suffix == ".safetensors" else _torch_file(path)
        except (SafetensorError, OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise CheckpointError(f"{path} cannot be read ({reason}): is it complete?") from error
        for name, tensor in found.items():
            name = mlp_heads.laions_name(name.removeprefix("module."))
            if name in tensors and mlp_heads.is_of_a_head(name):
                raise CheckpointError(f"{tensors[name].path} and {path} both hold {name}: remove one of the two")
            tensors[name] = tensor
    return tensors


def _weight_files(directory: Path) -> list[Path]:
    """The weight files of the first format that is there."""
    for single, several in (("model.safetensors", "model-*.safetensors"), ("pytorch_model.bin", "pytorch_model-*.bin")):
        if (directory / single).is_file():
            return [directory / single]
        if files := sorted(directory.glob(several)):
            return files
    return []


def _safetensors_file(path: Path) -> dict[str, StoredTensor]:
    handle = safe_open(path, framework="pt", device="cpu")

    def stored(name: str) -> StoredTensor:
        shape = tuple(handle.get_slice(name).get_shape())
        return StoredTensor(shape, lambda: handle.get_tensor(name), path)

    return {name: stored(name) for name in handle.keys()}  # noqa: SIM118, a handle is not a mapping


def _torch_file(path: Path) -> dict[str, StoredTensor]:
    # Mapped, not read; weights_only: a pickle from elsewhere must not run code.
    content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    tensors = {name: value for name, value in content.items() if isinstance(value, Tensor)}
    return {name: StoredTensor(tuple(value.shape), partial(_itself, value), path) for name, value in tensors.items()}


def _itself(tensor: Tensor) -> Tensor:
    return tensor
