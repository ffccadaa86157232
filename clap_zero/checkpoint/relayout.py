"""A checkpoint's optimizer state in an engine of other ranks, another ZeRO stage or another precision.

Each rank's own file says where the elements of each parameter lie in the optimizer's file of that rank (layout.py). A
rank of the new engine reads the stretches that it needs from those files, which are mapped and not loaded, so never
more than one stretch is in memory beside the engine. Nothing is gathered, and nothing is written to a disk.

What is carried over: masters, all states of the optimizer, the numbers of its groups (learning rate, betas), loss
scale, counters, the JSON's schedule. Rounding is not touched: every number is the one that was saved.
"""

from __future__ import annotations

import json
import pickle
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from safetensors import safe_open
from torch import Tensor

from clap_zero.checkpoint.engine_files import ENGINE_TAG
from clap_zero.checkpoint.layout import Piece, base_optimizer, is_scalar, masters, pieces, why_fixed
from clap_zero.checkpoint.settings import is_number
from clap_zero.distributed.collectives import all_gather_objects, rank_and_size
from clap_zero.errors import CheckpointError

METADATA = "optimizer_layout"
"""Key of a rank file's metadata under which the rank's pieces are."""

_SAVED_MASTERS = ("fp32_flat_groups", "single_partition_of_fp32_groups", "fp32_groups_flat")
_SAVED_STATES = ("base_optimizer_state", "optimizer_state_dict")
_LOSS_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
_SAFE = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]
"""DeepSpeed's own classes in its files; no others are unpickled."""


@dataclass(frozen=True)
class _Saved:
    """What one rank's file of the optimizer holds; tensors are mapped, not read.

    Attributes:
        masters: By number, in the order of the state dict.
        states: By number of the master.
        groups: The numbers of the parameter groups.
        loss_scale: Of `_LOSS_SCALE` what there is; empty without a dynamic one.
    """

    masters: dict[int, Tensor]
    states: dict[int, dict[str, Any]]
    groups: list[dict[str, Any]]
    loss_scale: dict[str, float]


def describe(engine: DeepSpeedEngine) -> str:
    """This rank's pieces as text, for `METADATA`; of equal ranks (stage 0) those of rank 0."""
    alike = engine.zero_optimization_stage() == 0
    return json.dumps([] if alike and rank_and_size()[0] else list(pieces(engine)), separators=(",", ":"))


def is_reordered(engine: DeepSpeedEngine, path: Path, manifest: Mapping[str, Any]) -> bool:
    """Whether a checkpoint of the engine's ranks, stage and precision has its weights in another order.

    Collective: all ranks must call.

    Raises:
        CheckpointError: On every rank: it has, and its optimizer state cannot be converted.
    """
    if why_fixed(engine.config) is not None:
        return False
    with safe_open(path / f"rank-{rank_and_size()[0]:05d}.safetensors", framework="pt") as file:
        there = (file.metadata() or {}).get(METADATA)  # None of an earlier version, or of a state that stays
    if not any(all_gather_objects(there not in (None, describe(engine)))):
        return False
    if fixed := manifest["fixed_layout"]:
        raise CheckpointError(
            f"checkpoint {path} has its weights in another order than this run, and its optimizer state cannot be "
            f"converted: {fixed}. Give round_robin_gradients and sub_group_size of zero_optimization as they were"
        )
    return True


def restore(engine: DeepSpeedEngine, path: Path, manifest: Mapping[str, Any]) -> None:
    """Puts a checkpoint of another layout into a fresh engine, all but its buffers. Collective: all ranks must call.

    Args:
        engine: An engine that has not trained yet.
        path: The checkpoint's directory, checked.
        manifest: Its manifest.

    Raises:
        CheckpointError: On every rank: something is missing there, or does not fit.
    """
    problem = None
    try:
        _fill(engine, path, manifest)
    except CheckpointError as error:
        problem = str(error)
    except (OSError, LookupError, TypeError, ValueError, RuntimeError, pickle.UnpicklingError) as error:
        problem = f"{type(error).__name__}: {error}"
    problems = all_gather_objects(problem)
    problem = next((f"rank {number}: {text}" for number, text in enumerate(problems) if text is not None), None)
    if problem is not None:
        raise CheckpointError(f"checkpoint {path} could not be converted to this run's ranks and stage ({problem})")
    _refresh(engine)


@torch.no_grad()
def _fill(engine: DeepSpeedEngine, path: Path, manifest: Mapping[str, Any]) -> None:
    """Writes this rank's masters, states and counters."""
    ours = masters(engine)
    wanted: dict[str, list[Piece]] = defaultdict(list)
    for piece in pieces(engine):
        wanted[piece.name].append(piece)
    missing = sum(piece.size for found in wanted.values() for piece in found)
    first = _read_optimizer(path, manifest, rank=0)
    states = _states(engine, ours, first)
    for rank in range(manifest["world_size"] if manifest["stage"] > 0 else 1):
        overlaps = [(old, new) for old in _read_pieces(path, rank) for new in wanted[old.name] if _overlap(old, new)]
        saved = first if rank == 0 else _read_optimizer(path, manifest, rank=rank) if overlaps else None
        for old, new in overlaps:
            assert saved is not None
            missing -= _overlap(old, new)
            _copy(saved.masters[old.master], ours[new.master], old, new)
            for key, value in saved.states.get(old.master, {}).items():
                if not is_scalar(value):
                    _copy(value, states[new.master][key], old, new)
    if missing:
        raise CheckpointError(f"{missing} weights of this rank are in none of its files")
    _restore_frozen(engine, path)
    _restore_numbers(engine, first)
    _restore_counters(engine, path)


def _overlap(old: Piece, new: Piece) -> int:
    """Elements that two pieces of one parameter share."""
    return max(0, min(old.start + old.size, new.start + new.size) - max(old.start, new.start))


def _copy(source: Tensor, target: Tensor, old: Piece, new: Piece) -> None:
    start, size = max(old.start, new.start), _overlap(old, new)
    values = source.detach().reshape(-1).narrow(0, old.offset + start - old.start, size)
    target.detach().view(-1).narrow(0, new.offset + start - new.start, size).copy_(values)


def _read_pieces(path: Path, rank: int) -> Iterator[Piece]:
    with safe_open(path / f"rank-{rank:05d}.safetensors", framework="pt") as file:
        yield from (Piece(*values) for values in json.loads(file.metadata()[METADATA]))


def _load(file: Path) -> dict[str, Any]:
    with torch.serialization.safe_globals(_SAFE):
        return torch.load(file, map_location="cpu", mmap=True, weights_only=True)


def _one_file(path: Path, pattern: str) -> Path:
    found = sorted((path / ENGINE_TAG).glob(pattern))
    if len(found) != 1:
        raise CheckpointError(f"{len(found)} files {pattern} in {ENGINE_TAG} instead of one")
    return found[0]


def _model_states(path: Path) -> dict[str, Any]:
    """DeepSpeed's file with the counters, and at stage 0 everything."""
    return _load(next(iter(sorted((path / ENGINE_TAG).glob("*mp_rank_00_model_states.pt")))))


def _read_optimizer(path: Path, manifest: Mapping[str, Any], *, rank: int) -> _Saved:
    module: dict[str, Tensor] = {}
    if manifest["stage"] > 0:
        content = _load(_one_file(path, f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"))["optimizer_state_dict"]
    else:
        whole = _model_states(path)
        content, module = whole["optimizer"], whole["module"]
    inner = next((content[name] for name in _SAVED_STATES if name in content), content)
    flat = next((content[name] for name in _SAVED_MASTERS if name in content), None)
    if flat is None and "fp32_groups" in content:
        flat = [master for group in content["fp32_groups"] for master in group]
    if flat is None:  # stage 0 in fp32: the parameters themselves, of which each is a piece
        flat = {piece.master: module[piece.name] for piece in _read_pieces(path, rank)}
    scaler = content.get("loss_scaler")
    scale = vars(scaler) if isinstance(scaler, DynamicLossScaler) else content
    dynamic = scale is not content or content.get("dynamic_loss_scale")
    return _Saved(
        masters=flat if isinstance(flat, dict) else dict(enumerate(flat)),
        states=inner["state"],
        groups=inner["param_groups"],
        loss_scale={name: scale[name] for name in _LOSS_SCALE if name in scale} if dynamic else {},
    )


def _states(engine: DeepSpeedEngine, ours: list[Tensor], saved: _Saved) -> list[dict[str, Any]]:
    """This rank's states of the optimizer by master, made where there are none yet, with the saved scalars.

    Adam's step is the largest of all: without gradient some optimizers do not count. Others must be the same.
    """
    optimizer = base_optimizer(engine)
    scalars: dict[str, set[float]] = defaultdict(set)
    tensors: set[str] = set()
    for state in saved.states.values():
        for key, value in state.items():
            if is_scalar(value):
                scalars[key].add(float(value))
            elif value is not None:
                tensors.add(key)
    differing = next((key for key, values in scalars.items() if len(values) > 1 and key != "step"), None)
    if differing is not None:
        raise CheckpointError(f"{differing} of {type(optimizer).__name__} differs between weights")
    as_tensors = type(optimizer).__module__.startswith("torch.")
    # As torch's own load_state_dict does: there the kernels read the step.
    on_device = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    for master in (master for master in ours if master.requires_grad):
        state = optimizer.state[master]
        for key in tensors:
            if key not in state:
                state[key] = torch.zeros_like(master, requires_grad=False)
            state[key].zero_()
        for key, values in scalars.items():
            value = max(values)
            if torch.is_tensor(state.get(key)):
                state[key].fill_(value)
            elif as_tensors:
                state[key] = torch.tensor(value, dtype=torch.float32, device=master.device if on_device else "cpu")
            else:
                state[key] = int(value) if value.is_integer() else value
    return [optimizer.state.get(master, {}) for master in ours]


def _restore_numbers(engine: DeepSpeedEngine, saved: _Saved) -> None:
    """Learning rate, betas and so on of the parameter groups; the loss scale, if both runs have a dynamic one."""
    groups = base_optimizer(engine).param_groups
    if len(groups) != len(saved.groups):
        raise CheckpointError(f"{len(saved.groups)} parameter groups there, {len(groups)} here")
    for group, before in zip(groups, saved.groups, strict=True):
        for key, value in before.items():
            if is_number(value) and is_number(group.get(key, 0.0)):
                group[key] = value
            elif key == "betas":
                group[key] = type(group[key])(value)
    scaler: Any = engine.optimizer
    scaler = getattr(scaler, "loss_scale_config", None) or getattr(scaler, "loss_scaler", scaler)
    if saved.loss_scale and (isinstance(scaler, DynamicLossScaler) or getattr(scaler, "dynamic_loss_scale", False)):
        for name, value in saved.loss_scale.items():
            if hasattr(scaler, name):
                setattr(scaler, name, value)


def _restore_counters(engine: DeepSpeedEngine, path: Path) -> None:
    saved = _model_states(path)
    if engine.lr_scheduler is not None and saved["lr_scheduler"] is not None:
        engine.lr_scheduler.load_state_dict(saved["lr_scheduler"])
    engine.global_steps = saved["global_steps"]
    engine.global_samples = saved["global_samples"]
    engine.skipped_steps = saved["skipped_steps"]


def _restore_frozen(engine: DeepSpeedEngine, path: Path) -> None:
    """Parameters that are not trained have no masters; the consolidated weights hold them."""
    rank, _ = rank_and_size()
    frozen = {name: value for name, value in engine.module.named_parameters() if not value.requires_grad}
    for file in sorted(path.glob("model-*.safetensors")) if frozen else []:
        with safe_open(file, framework="pt") as weights:
            for name in set(weights.keys()) & frozen.keys():
                values, target = weights.get_tensor(name).flatten(), frozen[name]
                if hasattr(target, "ds_tensor"):
                    part = target.partition_numel()
                    values = values[rank * part : (rank + 1) * part]
                    target = target.ds_tensor
                target.detach().view(-1)[: values.numel()].copy_(values)


@torch.no_grad()
def _refresh(engine: DeepSpeedEngine) -> None:
    """The parameters that the forward uses, from the masters. Collective: all ranks must call."""
    optimizer: Any = engine.optimizer
    if engine.zero_optimization_stage() == 3:
        optimizer.checkpoint_event_prologue()
        for number in range(len(optimizer.fp32_partitioned_groups_flat)):
            optimizer._reassign_or_swap_out_partitioned_parameters(number)
        optimizer.checkpoint_event_epilogue()
    elif engine.zero_optimization_stage() > 0:
        optimizer.update_lp_params()
    else:
        parameters = dict(engine.module.named_parameters())
        ours = masters(engine)
        for piece in pieces(engine):
            values = ours[piece.master].view(-1).narrow(0, piece.offset, piece.size)
            parameters[piece.name].view(-1).copy_(values)
