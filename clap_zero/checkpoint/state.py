"""What a checkpoint holds, and putting it back into an engine.

engine/                       DeepSpeed's files: optimizer, masters, loss scale, scheduler, laid out for ranks and stage
rank-00000.safetensors        a rank's own buffers (BatchNorm statistics), and what lies where in its optimizer
model-00001-of-0000n.safetensors, model.safetensors.index.json, config.json
                              the fp32 masters under Hugging Face's names, readable by any number of processes
preprocessor_config.json, tokenizer.json...
                              what else the model needs (`companions`), so that a checkpoint needs no other directory
trainer_state.json            where training stands
manifest.json                 sizes and checksums of all this; see store.py

The same ranks, stage and precision load DeepSpeed's files as they are; others convert them (relayout.py).
Random states are not kept: training draws from (seed, step, micro batch, rank), data from (seed, epoch, place).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import deepspeed
import torch
from deepspeed import DeepSpeedEngine

from clap_zero.checkpoint import relayout
from clap_zero.checkpoint.buffers import read_buffers, restore_buffers, saved_buffers
from clap_zero.checkpoint.engine_files import ENGINE_TAG, save_engine
from clap_zero.checkpoint.files import ChecksummedFile, FileRecord, checksum_file, save_tensors, write_json
from clap_zero.checkpoint.layout import odd_state, why_fixed
from clap_zero.checkpoint.manifest import MANIFEST, find_fault, read_manifest
from clap_zero.checkpoint.settings import own_settings
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
            fixed = why_fixed(engine.config) is not None
            layout = {} if fixed else {relayout.METADATA: relayout.describe(engine)}
            buffers = saved_buffers(engine.module)
            records[name] = save_tensors(temporary / name, buffers, {"format": "pt"} | layout)
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

    Of another number of ranks, BatchNorm statistics are those of the consolidated weights, the same on every rank.

    Args:
        engine: An engine that has not trained or saved yet, of the same model and optimizer as the one that saved.
        path: A checkpoint's directory.

    Returns:
        Where training stood, with the ranks and the stage of this engine.

    Raises:
        CheckpointError: On every rank: it is incomplete, of another model, or laid out for other ranks, another stage
            or precision and cannot be converted.
    """
    path = Path(path)
    rank, world_size = rank_and_size()
    faults = all_gather_objects(find_fault(path, share=(rank, world_size)))
    fault = next((text for text in faults if text is not None), None)
    if fault is not None:
        raise CheckpointError(f"checkpoint {path} cannot be used: {fault}")
    manifest = read_manifest(path)
    _check_model(engine, path)
    here = Layout(world_size, engine.zero_optimization_stage(), engine_precision(engine))
    there = conversion(path, here, config=engine.config)
    state = read_train_state(path)
    problem = None
    with own_settings(engine):
        # Where neither differs, a setting may: DeepSpeed, which reads by position, would mix up the weights.
        if there is not None or relayout.is_reordered(engine, path, manifest):
            relayout.restore(engine, path, manifest)
        elif engine.load_checkpoint(str(path), tag=ENGINE_TAG)[0] is None:
            problem = "DeepSpeed found nothing to load"
    if problem is None and engine.global_steps != manifest["engine_steps"]:
        problem = f"the engine stands at step {engine.global_steps} instead of {manifest['engine_steps']} after loading"
    own = path / rank_file(rank) if world_size == manifest["world_size"] else None
    problems = all_gather_objects(problem or restore_buffers(engine.module, read_buffers(path, own)))
    problem = next((f"rank {number}: {text}" for number, text in enumerate(problems) if text is not None), None)
    if problem is not None:
        raise CheckpointError(f"checkpoint {path} could not be loaded ({problem})")
    return replace(state, world_size=here.world_size, stage=here.stage)


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
    """What the manifest says of the checkpoint as a whole; `fixed_layout`: why it cannot be converted, if it cannot."""
    return {
        "fixed_layout": why_fixed(engine.config) or odd_state(engine),
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


def _check_model(engine: DeepSpeedEngine, path: Path) -> None:
    """Refuse a checkpoint of another model. Raises CheckpointError."""
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


class Layout(NamedTuple):
    """What decides where DeepSpeed keeps the elements of the optimizer state.

    Attributes:
        world_size: Ranks.
        stage: ZeRO stage.
        precision: Of the weights in forward and backward: fp32, bf16 or fp16.
    """

    world_size: int
    stage: int
    precision: str

    def __str__(self) -> str:
        return f"{self.world_size} rank{'s' * (self.world_size > 1)}, ZeRO stage {self.stage}, {self.precision}"


def conversion(path: Path, here: Layout, *, config: Mapping[str, Any]) -> Layout | None:
    """How a checkpoint is laid out, if its optimizer state has to be converted for a run.

    Args:
        path: A complete checkpoint.
        here: Layout of this run.
        config: Its resolved DeepSpeed configuration.

    Returns:
        The checkpoint's layout; None where nothing has to be converted.

    Raises:
        CheckpointError: It would have to be converted, and cannot be.
    """
    manifest = read_manifest(path)
    there = Layout(manifest["world_size"], manifest["stage"], manifest["precision"])
    if there == here:
        return None
    fixed = manifest.get("fixed_layout", "it was saved by an earlier version") or why_fixed(config)
    if fixed is None:
        return there
    raise CheckpointError(
        f"checkpoint {path} does not fit this run ({there} there; {here} here), and its optimizer state cannot be "
        f"converted: {fixed}. Train with the same ranks, stage and precision, or take only its weights into a new run: "
        f"`clap-zero export {path.parent.parent} DIR`, then `--model.pretrained DIR` with another --run_dir"
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
