"""The consolidated weights of a checkpoint: fp32 masters under Hugging Face's names, streamed to safetensors files."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from torch import Tensor, nn

from clap_zero.checkpoint.buffers import merge_over_ranks, persistent_buffers
from clap_zero.checkpoint.files import (
    FileRecord,
    SafetensorsWriter,
    TensorSpec,
    model_file_name,
    save_tensors,
    split_into_files,
    write_json,
)
from clap_zero.checkpoint.masters import full_shape, stream_masters
from clap_zero.distributed.collectives import rank_and_size
from clap_zero.model import logit_bias, mlp_heads
from clap_zero.model.clap import MAX_LOGIT_SCALE

MAX_FILE_BYTES = 256 << 20
INDEX, CONFIG = "model.safetensors.index.json", "config.json"
SCALE_NAMES = ("logit_scale_a", "logit_scale_t")
"""Parameters that Hugging Face keeps without a dimension; here they have shape (1,), because DeepSpeed cannot train
0-dimensional ones."""


def _spec(name: str, shape: torch.Size, dtype: torch.dtype) -> TensorSpec:
    scalar = name.rpartition(".")[2] in SCALE_NAMES and shape.numel() == 1
    return TensorSpec(name, () if scalar else tuple(shape), dtype)


def _weight_specs(module: nn.Module) -> list[TensorSpec]:
    """What the weight files will hold: all parameters as fp32, then the persistent buffers (floating ones as fp32)."""
    specs = [
        _spec(name, full_shape(parameter), torch.float32)
        for name, parameter in module.named_parameters()
        if name != logit_bias.PARAMETER and not mlp_heads.is_of_a_head(name)
    ]
    for name, buffer in persistent_buffers(module).items():
        specs.append(_spec(name, buffer.shape, torch.float32 if buffer.is_floating_point() else buffer.dtype))
    return specs


def _stream(
    engine: DeepSpeedEngine, config: dict[str, object], heads: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Names and values in the order of the specs, which are those of Hugging Face's ClapModel.

    The sigmoid objective's bias goes to `config` instead, and LAION's heads to `heads`.
    """
    for name, value in stream_masters(engine):
        if name == logit_bias.PARAMETER:
            config[logit_bias.CONFIG_KEY] = float(value)
            continue
        if mlp_heads.is_of_a_head(name):
            heads[name] = value.to("cpu", copy=True)
            continue
        # The trainer holds a scale that overshot within its bounds in every forward; other programs do not.
        bounded = name.rpartition(".")[2] in SCALE_NAMES
        yield name, value.clamp(0.0, math.log(MAX_LOGIT_SCALE)) if bounded else value
    for name, buffer in merge_over_ranks(persistent_buffers(engine.module)).items():
        yield name, buffer.float() if buffer.is_floating_point() else buffer


def write_weights(
    engine: DeepSpeedEngine, directory: Path, *, max_file_bytes: int = MAX_FILE_BYTES
) -> tuple[dict[str, FileRecord], OSError | None]:
    """Writes weight files, their index, LAION's heads if any, and config.json.

    Collective: all ranks must call; rank 0 writes.

    Args:
        engine: The engine whose masters are written. Its module has a Hugging Face `config`.
        directory: An existing directory.
        max_file_bytes: Largest weight file, except for a single larger tensor.

    Returns:
        The files that this rank wrote, and its first error. After an error the collectives are still gone through, so
        that no other rank waits.
    """
    rank, _ = rank_and_size()
    files = split_into_files(_weight_specs(engine.module), max_file_bytes)
    if rank != 0:
        for _ in _stream(engine, {}, {}):
            pass
        return {}, None
    config, heads = model_config(engine.module), dict[str, Tensor]()
    stream = _stream(engine, config, heads)
    records: dict[str, FileRecord] = {}
    try:
        for index, specs in enumerate(files):
            name = model_file_name(index, len(files))
            with SafetensorsWriter(directory / name, specs) as file:
                for _ in specs:
                    file.add(*next(stream))
            records[name] = file.record
        weight_map = {
            spec.name: model_file_name(index, len(files)) for index, specs in enumerate(files) for spec in specs
        }
        total = sum(spec.size_bytes for specs in files for spec in specs)
        records[INDEX] = write_json(
            directory / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        )
        for _ in stream:  # to the end: what goes elsewhere may come last
            pass
        if heads:
            records[mlp_heads.FILE] = save_tensors(directory / mlp_heads.FILE, heads)
        assert (getattr(engine.module, logit_bias.PARAMETER, None) is None) == (logit_bias.CONFIG_KEY not in config)
        records[CONFIG] = write_json(directory / CONFIG, config)
        error = None
    except OSError as failure:
        error = failure
    for _ in stream:  # normally at its end
        pass
    return records, error


def model_config(module: Any) -> dict[str, object]:
    """config.json of the module as a plain ClapModel with fp32 weights."""
    config = json.loads(module.config.to_json_string(use_diff=True))
    return config | {"architectures": ["ClapModel"], "dtype": "float32"}
