"""The only wiring place: from a parsed command line to a `Trainer` that is ready to fit.

`prepare` settles everything that can be known before a model is built; `build` makes the parts and joins them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from clap_zero.checkpoint.store import CheckpointStore
from clap_zero.config.deepspeed import Machine, ResolvedDeepSpeed, load_ds_json, resolve
from clap_zero.config.load import CommandLine, dump_run_config
from clap_zero.config.preset import load_preset
from clap_zero.config.schema import RunConfig
from clap_zero.data.embedded import embedded_sounds
from clap_zero.data.index import ShardIndex, load_index
from clap_zero.data.partition import steps_per_epoch
from clap_zero.distributed import collectives
from clap_zero.distributed.world import World, set_cpu_threads
from clap_zero.errors import CheckpointError, ClapZeroError, ConfigError, DataError
from clap_zero.training.loop import Plan, Trainer
from clap_zero.training.run_directory import RunDirectory, RunLock

LOCK_WAIT_S = 20.0
"""How long the processes of a killed job may take to go away before a new one gives up."""

T = TypeVar("T")


@dataclass(frozen=True)
class Prepared:
    """Everything that is settled before a model is built; equal on all ranks.

    Attributes:
        run: The run config, complete.
        resolved: The checked DeepSpeed configuration.
        directory: The run's directory, locked.
        train: The training shards.
        val: The held-out shards, None without any.
        plan: The length of the run.
        attempt: 1 for the first start of the run.
        resume_from: The checkpoint to load, None for a new run.
        lock: Held until `close`.
    """

    run: RunConfig
    resolved: ResolvedDeepSpeed
    directory: RunDirectory
    train: ShardIndex
    val: ShardIndex | None
    plan: Plan
    attempt: int
    resume_from: Path | None
    lock: RunLock

    def close(self) -> None:
        self.lock.release()


def prepare(command: CommandLine, *, world: World) -> Prepared | None:
    """Check everything, take the run directory, write down what is settled.

    Collective: all ranks must call.

    Returns:
        None when the run is already finished.

    Raises:
        ClapZeroError: Something is wrong; the same error is raised on all ranks, and rank 0 reports it.
    """
    lock = RunLock(Path(command.run.run_dir))
    memory_bytes = min(collectives.all_gather_objects(_memory_bytes(world)))
    prepared = on_main(world, lambda: _settle(command, lock, world=world, memory_bytes=memory_bytes))
    if prepared is None:
        lock.release()
        return None
    lock.share()
    # Only rank 0 has its lock in the object; the others keep their own.
    collectives.barrier()
    return Prepared(**prepared, lock=lock)


def on_main(world: World, function: Callable[[], T]) -> T:
    """Run a function on rank 0 and give its result, or its error, to all ranks.

    Collective: all ranks must call.

    Raises:
        ClapZeroError: What the function raised on rank 0.
    """
    result: T | None = None
    error: ClapZeroError | None = None
    if world.is_main:
        try:
            result = function()
        except ClapZeroError as raised:
            error = raised
    result, error = collectives.broadcast_object((result, error))
    if error is not None:
        error.reported_elsewhere = not world.is_main
        raise error
    return result


def _settle(command: CommandLine, lock: RunLock, *, world: World, memory_bytes: int) -> dict[str, Any] | None:
    """Rank 0's part of `prepare`: files are read and written here only.

    Returns:
        The fields of `Prepared` without the lock; None when the run is finished.
    """
    directory = RunDirectory(Path(command.run.run_dir))
    if command.run.resume == "never":
        _make_room(directory, lock, force=command.run.force)
    directory.create()
    lock.acquire_alone(wait_s=LOCK_WAIT_S)
    run, notes = _with_data(command)
    train, val = load_index(run.data.train), load_index(run.data.val) if run.data.val else None
    ds = load_ds_json(command.ds_path, command.ds_overrides)
    recorded = None if run.force else directory.recorded_ds_config()
    machine = Machine(memory_bytes=memory_bytes, num_samples=train.num_samples, device_type=world.device.type)
    resolved = resolve(ds, run, world_size=world.size, machine=machine, recorded=recorded)
    plan = _plan(run, resolved, train)
    data = {"train": _summary(train), "val": None if val is None else _summary(val)}
    contents = run.model_dump(mode="json")
    directory.check_unchanged(run=contents, ds=resolved.config, data=data, force=run.force)
    finished = directory.finished_step()
    if finished is not None and finished >= plan.max_steps:
        print(f"{directory.path} is already complete: {finished} steps. Give another --run_dir for a new run.")
        return None
    store = CheckpointStore(directory.checkpoints_path)
    resume_from = _checkpoint_to_load(run, store)
    directory.record(run=dump_run_config(run), ds=resolved.config, data=data)
    attempt = directory.next_attempt()
    _tell(
        [
            *command.notes,
            *notes,
            *resolved.explanation,
            f"data: {train.num_samples} training pairs in {len(train.shards)} shards, "
            f"{val.num_samples if val else 0} held out",
            f"length: {plan.max_steps} steps, {plan.steps_per_epoch} an epoch, "
            f"{train.num_samples - plan.steps_per_epoch * plan.global_batch} pairs of each epoch left over",
            f"BatchNorm: {run.model.batch_norm}; threads per rank: {set_cpu_threads(world)}",
            f"negatives: the {resolved.micro_batch * world.size} pairs of a micro batch over all ranks"
            + (f", not the {plan.global_batch} of a step" if resolved.accumulation > 1 else ", all of a step"),
            f"run: {directory.path}, attempt {attempt}, " + (f"from {resume_from}" if resume_from else "from step 0"),
        ]
    )
    return {
        "run": run,
        "resolved": resolved,
        "directory": directory,
        "train": train,
        "val": val,
        "plan": plan,
        "attempt": attempt,
        "resume_from": resume_from,
    }


def build(prepared: Prepared, *, world: World, stop_requested: Callable[[], str | None]) -> Trainer:
    """Make the model, the engine, the data, the hooks, and join them.

    Collective: all ranks must call.

    Args:
        prepared: What `prepare` settled.
        world: The ranks.
        stop_requested: Name of the signal that asked this rank to stop, None without one.
    """
    # Heavy imports: not before the configuration is known to be good.
    from clap_zero.audio.features import ClapFeatures
    from clap_zero.checkpoint.state import TrainState, load
    from clap_zero.data.loader import LoaderPlan, train_batches
    from clap_zero.data.partition import DataPosition
    from clap_zero.model.clap import build_model, feature_config
    from clap_zero.training.engine import Engine
    from clap_zero.training.schedule import Schedule
    from clap_zero.training.step import Stepper

    run, resolved, plan = prepared.run, prepared.resolved, prepared.plan
    set_cpu_threads(world)
    model = build_model(
        geometry=None if run.model.preset is None else load_preset(run.model.preset).model,
        pretrained=run.model.pretrained,
        batch_norm=run.model.batch_norm,
        dropout=run.model.dropout,
        seed=run.train.seed,
        ds_config=resolved.config,
        device=world.device,
    )
    engine = Engine(model, resolved=resolved, weight_decay=run.train.weight_decay, world=world)
    state = TrainState(world_size=world.size, stage=resolved.stage)
    if prepared.resume_from is not None:
        state = load(engine.deepspeed, prepared.resume_from)
    config = feature_config(model.config, run.model.pretrained, truncation=run.data.truncation)
    features = ClapFeatures(config, device=world.device)
    batches = train_batches(
        prepared.train,
        plan=LoaderPlan(
            rank=world.rank,
            world_size=world.size,
            micro_batch=resolved.micro_batch,
            accumulation=resolved.accumulation,
            position=DataPosition(epoch=state.epoch, offset=state.offset),
            seed=run.train.seed,
            features=config,
            tokenizer_path=run.model.pretrained,
            workers=_num_workers(run, world),
            data=run.data,
        ),
    )
    schedule = Schedule(
        peak=run.train.learning_rate,
        minimum=run.train.min_learning_rate,
        warmup_steps=run.train.warmup_steps,
        max_steps=plan.max_steps,
        kind=run.train.schedule,
    )
    stepper = Stepper(
        engine,
        batches=batches,
        features=features,
        learning_rate=None if engine.has_json_scheduler else schedule,
        accumulation=resolved.accumulation,
        seed=run.train.seed,
        world=world,
    )
    return Trainer(
        engine,
        stepper=stepper,
        hooks=_hooks(prepared, features=features, batches=batches, start_step=state.step, world=world),
        state=state,
        plan=plan,
        world=world,
        run_dir=prepared.directory.path,
        stop_requested=stop_requested,
    )
