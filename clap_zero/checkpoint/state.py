"""What a checkpoint holds, and putting it back into an engine.

engine/                       DeepSpeed's files: optimizer, masters, loss scale, scheduler (this world size and stage)
rank-00000.safetensors        a rank's own buffers (BatchNorm statistics)
model-00001-of-0000n.safetensors, model.safetensors.index.json, config.json
                              the fp32 masters under Hugging Face's names, readable by any number of processes
preprocessor_config.json, tokenizer.json...
                              what else the model needs (`companions`), so that a checkpoint needs no other directory
trainer_state.json            where training stands
manifest.json                 sizes and checksums of all this; see store.py

Random states are not kept: training draws from (seed, step, micro batch, rank), data from (seed, epoch, place).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed import DeepSpeedEngine
from safetensors import safe_open
from torch import Tensor

from clap_zero.checkpoint.buffers import persistent_buffers
from clap_zero.checkpoint.engine_files import ENGINE_TAG, save_engine
from clap_zero.checkpoint.files import ChecksummedFile, FileRecord, checksum_file, save_tensors, write_json
from clap_zero.checkpoint.manifest import MANIFEST, find_fault, read_manifest
from clap_zero.checkpoint.store import CheckpointStore
from clap_zero.checkpoint.weights import model_config, write_weights
from clap_zero.distributed.collectives import all_gather_objects, broadcast_object, rank_and_size
from clap_zero.errors import CheckpointError
from clap_zero.model import logit_bias, mlp_heads
from clap_zero.model.pretrained import read_model_config

TRAINER_STATE = "trainer_state.json"
_DESCRIPTIVE = ("architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path")
"""Entries of a config.json that say nothing about the geometry."""


@dataclass(frozen=True)
class TrainState:
    """Where training stands.

    Attributes:
        step: Optimizer steps done.
        epoch: Epoch of the next sample, 0-based.
        offset: Samples of that epoch already consumed by all ranks together.
        samples: Pairs consumed since the start by all ranks together.
        world_size: Ranks of the run that saved.
        stage: Its ZeRO stage.
    """

    step: int
    epoch: int
    offset: int
    samples: int
    world_size: int
    stage: int


def engine_precision(engine: DeepSpeedEngine) -> str:
    """Precision of the engine's parameters: fp32, bf16 or fp16."""
    if engine.fp16_enabled():
        return "fp16"
    return "bf16" if engine.bfloat16_enabled() else "fp32"


def rank_file(rank: int) -> str:
    """Name of the file with a rank's own state."""
    return f"rank-{rank:05d}.safetensors"


def save(
    engine: DeepSpeedEngine, store: CheckpointStore, state: TrainState, *, companions: Mapping[str, bytes] | None = None
) -> Path:
    """Writes a checkpoint of the engine. Collective: all ranks must call.

    Old checkpoints stay as they are until the new one is complete; call `store.prune` on rank 0 afterwards.

    Args:
        engine: The engine between two optimizer steps.
        store: Where it goes; the directory must be shared by all nodes.
        state: Where training stands.
        companions: Contents by name of further files, as `checkpoint.source.companions` makes them. Rank 0's count.

    Returns:
        The checkpoint's directory.

    Raises:
        CheckpointError: On every rank, if any rank could not write (disk full, not shared). Nothing is lost.
    """
    rank, _ = rank_and_size()
    temporary = _on_rank_0(lambda: store.begin(state.step), f"cannot write a checkpoint into {store.root}")
    records, error = save_engine(engine, temporary)
    weights, weights_error = write_weights(engine, temporary)
    error = error or weights_error
    records |= weights
    if error is None:
        try:
            name = rank_file(rank)
            records[name] = save_tensors(temporary / name, _rank_tensors(engine))
            if rank == 0:
                records[TRAINER_STATE] = write_json(temporary / TRAINER_STATE, asdict(state))
                for name, content in (companions or {}).items():
                    with ChecksummedFile(temporary / name) as file:
                        file.write(content)
                    records[name] = file.record
        except OSError as failure:
            error = failure
    gathered = all_gather_objects((records, None if error is None else str(error)))
    failures = [f"rank {number}: {text}" for number, (_, text) in enumerate(gathered) if text is not None]
    if failures:
        if rank == 0:
            store.abandon(temporary)
        raise CheckpointError(
            f"the checkpoint of step {state.step} could not be written into {store.root} ({'; '.join(failures)}). "
            "Earlier checkpoints are intact: make room and run the same command again"
        )

    def commit() -> Path:
        files = {name: record for part, _ in gathered for name, record in part.items()}
        files |= _unrecorded(temporary, files)
        return store.commit(temporary, state.step, files, about=_about(engine, state))

    try:
        return _on_rank_0(commit, f"the checkpoint of step {state.step} could not be completed in {store.root}")
    except CheckpointError:
        if rank == 0:
            store.abandon(temporary)
        raise


def load(engine: DeepSpeedEngine, path: Path) -> TrainState:
    """Puts a checkpoint into a fresh engine. Collective: all ranks must call.

    Args:
        engine: An engine that has not trained or saved yet, built as the one that saved.
        path: A checkpoint's directory.

    Returns:
        Where training stood.

    Raises:
        CheckpointError: On every rank: it is incomplete, or of another model, world size, stage or precision.
    """
    path = Path(path)
    rank, world_size = rank_and_size()
    faults = all_gather_objects(find_fault(path, share=(rank, world_size)))
    fault = next((text for text in faults if text is not None), None)
    if fault is not None:
        raise CheckpointError(f"checkpoint {path} cannot be used: {fault}")
    manifest = read_manifest(path)
    _check_fit(engine, path)
    state = read_train_state(path)
    loaded, _ = engine.load_checkpoint(str(path), tag=ENGINE_TAG)
    problem = None
    if loaded is None:
        problem = "DeepSpeed found nothing to load"
    elif engine.global_steps != manifest["engine_steps"]:
        problem = f"the engine stands at step {engine.global_steps} instead of {manifest['engine_steps']} after loading"
    problems = all_gather_objects(problem or _restore_rank(engine, path / rank_file(rank)))
    problem = next((f"rank {number}: {text}" for number, text in enumerate(problems) if text is not None), None)
    if problem is not None:
        raise CheckpointError(f"checkpoint {path} could not be loaded ({problem})")
    return state


def read_train_state(path: Path) -> TrainState:
    """Reads where training stood when a checkpoint was written.

    Raises:
        CheckpointError: The file is missing or has other entries.
    """
    file = Path(path) / TRAINER_STATE
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        return TrainState(**{field.name: int(values[field.name]) for field in fields(TrainState)})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file}: not a training state ({error!r})") from error


def _on_rank_0(action: Callable[[], Path], complaint: str) -> Path:
    """Runs an action on rank 0 and gives its result, or its error, to all ranks. Collective."""
    rank, _ = rank_and_size()
    result: Path | None = None
    error: str | None = None
    if rank == 0:
        try:
            result = action()
        except (OSError, CheckpointError) as failure:
            error = str(failure)
    result, error = broadcast_object((result, error))
    if error is not None:
        raise CheckpointError(f"{complaint} ({error})")
    assert result is not None
    return result


def _about(engine: DeepSpeedEngine, state: TrainState) -> dict[str, Any]:
    return {
        "world_size": state.world_size,
        "stage": state.stage,
        "precision": engine_precision(engine),
        "engine_steps": engine.global_steps,
        "torch": str(torch.__version__),
        "deepspeed": deepspeed.__version__,
    }


def _unrecorded(root: Path, known: Mapping[str, FileRecord]) -> dict[str, FileRecord]:
    """Files that DeepSpeed wrote without the checkpoint engine (optimizer states offloaded to NVMe)."""
    names = (str(file.relative_to(root)) for file in root.rglob("*") if file.is_file())
    return {name: checksum_file(root / name) for name in names if name not in known and name != MANIFEST}


def _check_fit(engine: DeepSpeedEngine, path: Path) -> None:
    """Refuse a checkpoint of another model, or of another layout. Raises CheckpointError."""
    there, ours = _geometry(read_model_config(path)), _geometry(model_config(engine.module))
    if there.pop(logit_bias.CONFIG_KEY, None) is not None:
        there["bias of the sigmoid objective"] = "learned"
    if getattr(engine.module, logit_bias.PARAMETER, None) is not None:
        ours["bias of the sigmoid objective"] = "learned"
    if (path / mlp_heads.FILE).is_file():
        there["LAION's MLP heads"] = "trained"
    if getattr(engine.module, "has_heads", False):
        ours["LAION's MLP heads"] = "trained"
    other = [key for key in sorted(there.keys() | ours.keys()) if there.get(key, "-") != ours.get(key, "-")]
    if other:
        details = "; ".join(f"{key} {there.get(key, '-')} there, {ours.get(key, '-')} here" for key in other)
        raise CheckpointError(f"checkpoint {path} is of another model ({details}): give the one that it was saved from")
    check_layout(
        path,
        world_size=rank_and_size()[1],
        stage=engine.zero_optimization_stage(),
        precision=engine_precision(engine),
    )


def check_layout(path: Path, *, world_size: int, stage: int, precision: str) -> None:
    """Refuse a checkpoint whose optimizer state is laid out for other ranks, another ZeRO stage or precision.

    Args:
        path: A complete checkpoint.
        world_size: Ranks of this run.
        stage: Its ZeRO stage.
        precision: Its weights in forward and backward: fp32, bf16 or fp16.

    Raises:
        CheckpointError: It does not fit.
    """
    manifest = read_manifest(path)
    words = {
        "world_size": ("ranks", world_size),
        "stage": ("ZeRO stage", stage),
        "precision": ("precision", precision),
    }
    differing = [
        f"{word} {manifest[key]} there, {here} here" for key, (word, here) in words.items() if manifest[key] != here
    ]
    if not differing:
        return
    run = path.parent.parent
    raise CheckpointError(
        f"checkpoint {path} does not fit this run ({'; '.join(differing)}), and its optimizer state cannot be "
        "converted. Train with the same ranks, stage and precision, or take only its weights into a new run: "
        f"`clap-zero export {run} DIR`, then `--model.pretrained DIR` with another --run_dir"
    )


def _geometry(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The entries of a config.json that decide what the model computes in evaluation, by dotted name."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= _geometry(value, f"{prefix}{key}.")
        elif "drop" not in key and key not in _DESCRIPTIVE:
            flat[prefix + key] = value
    return flat


def _rank_tensors(engine: DeepSpeedEngine) -> dict[str, Tensor]:
    return {f"buffer.{name}": buffer.detach() for name, buffer in persistent_buffers(engine.module).items()}


@torch.no_grad()
def _restore_rank(engine: DeepSpeedEngine, file: Path) -> str | None:
    """Gives a rank its buffers back; returns what is wrong with the file, if anything."""
    buffers = persistent_buffers(engine.module)
    with safe_open(file, framework="pt") as saved:
        names = set(saved.keys())
        differing = buffers.keys() ^ {name.removeprefix("buffer.") for name in names}
        if differing:
            return f"{file.name} and the model do not have the same buffers: {', '.join(sorted(differing)[:3])}"
        for name, buffer in buffers.items():
            values = saved.get_tensor(f"buffer.{name}")
            if values.shape != buffer.shape:
                return f"{name} has shape {tuple(values.shape)} in {file.name} and {tuple(buffer.shape)} in the model"
            buffer.copy_(values)
    return None
