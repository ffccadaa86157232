"""The only wiring place: makes the model, the engine, the data and the hooks, and joins them to a `Trainer`."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from clap_zero.audio.features import ClapFeatures, FeatureConfig
from clap_zero.checkpoint.source import companions, tokenizer_directory
from clap_zero.checkpoint.state import TrainState, load
from clap_zero.checkpoint.store import CheckpointStore
from clap_zero.config.objective import needs_caching
from clap_zero.config.preset import load_preset
from clap_zero.data.batch import LoaderPlan, batches_ahead
from clap_zero.data.index import policy_of
from clap_zero.data.loader import eval_batches, train_batches
from clap_zero.data.partition import DataPosition
from clap_zero.data.public import holds_secrets, public_config
from clap_zero.data.skip_limit import SkipLimit
from clap_zero.data.stored_kind import check_stored_kind
from clap_zero.distributed import collectives
from clap_zero.distributed.collectives import patient_wait
from clap_zero.distributed.world import World, cores_per_rank, set_cpu_threads
from clap_zero.hooks.checkpoint import CheckpointHook
from clap_zero.hooks.console import ConsoleHook
from clap_zero.hooks.data import DataHook
from clap_zero.hooks.evaluate import EvaluateHook
from clap_zero.hooks.jsonl import EndHook, KeysHook, MetricsHook
from clap_zero.hooks.speed import SpeedHook
from clap_zero.hooks.wandb import WandbHook
from clap_zero.model.activation import enable_activation_checkpointing
from clap_zero.model.clap import Parts, build_model, clap_config, feature_config
from clap_zero.model.logit_bias import told_bias
from clap_zero.model.pretrained import read_config, resolve_pretrained, stores_heads
from clap_zero.objective.config import ObjectiveConfig
from clap_zero.phases import phase
from clap_zero.training.engine import Engine
from clap_zero.training.hooks import Hook
from clap_zero.training.loop import Trainer
from clap_zero.training.objective import RunObjective
from clap_zero.training.passes import CachedPasses, Forward, MicroPasses, Passes
from clap_zero.training.prepare import Settled, on_main
from clap_zero.training.say import say
from clap_zero.training.schedule import Schedule
from clap_zero.training.step import Stepper

MOST_WORKERS = 8
"""Loader processes that `data.workers: auto` gives a rank at the most."""

SOONER = 0.9
"""Part of `distributed.hang_timeout_s` that a rank waits for its loader."""


def build(settled: Settled, *, world: World, stop_requested: Callable[[], str | None]) -> Trainer:
    """Make the parts of a run and join them.

    Collective: all ranks must call.

    Args:
        settled: What `prepare` settled.
        world: The ranks.
        stop_requested: Name of the signal that asked this rank to stop, None without one.
    """
    run, resolved = settled.run, settled.resolved
    threads = set_cpu_threads(world)
    # What torch does by itself, written out: a variable or a library may have changed it.
    torch.set_float32_matmul_precision("highest")
    if world.is_main:
        say(_told_compute(threads, world))
    # A hub name becomes a directory here, once, for the weights, the features and the tokenizer alike.
    pretrained = None if run.model.pretrained is None else str(resolve_pretrained(run.model.pretrained))
    geometry = None if run.model.preset is None else load_preset(run.model.preset).model
    model_config = clap_config(geometry or {}) if pretrained is None else read_config(Path(pretrained))
    config = feature_config(model_config, pretrained, truncation=run.data.truncation)
    on_main(world, lambda: _check_stored(settled, config, weights=pretrained))
    with phase("model"):
        model = build_model(
            geometry=geometry,
            pretrained=pretrained,
            batch_norm=run.model.batch_norm,
            dropout=run.model.dropout,
            seed=run.train.seed,
            ds_config=resolved.config,
            device=world.device,
            parts=Parts(bias=run.objective.loss == "sigmoid", mlp=run.objective.mlp),
        )
    if world.is_main and model.has_heads:
        say("LAION's MLP loss, because the weights hold its heads; --objective.mlp off leaves them out")
    bias_line = told_bias(model_config, wanted=run.objective.loss == "sigmoid")
    if world.is_main and pretrained is not None and settled.resume_from is None and bias_line is not None:
        say(bias_line)
    enable_activation_checkpointing(model, resolved.config)
    patient_wait()  # weights are not read equally fast
    engine = Engine(model, resolved=resolved, world=world)
    if world.size > 1:
        collectives.set_timeout(run.distributed.timeout_s)  # of the groups that DeepSpeed made
    state = TrainState(step=0, epoch=0, offset=0, samples=0, world_size=world.size, stage=resolved.stage)
    if settled.resume_from is not None:
        with phase("checkpoint"):
            state = load(engine.deepspeed, settled.resume_from)
    on_main(world, settled.record)
    features = ClapFeatures(config, device=world.device)
    # Without tokenizer files beside the weights, the embedded RoBERTa vocabulary.
    tokenizer = None if pretrained is None else tokenizer_directory(Path(pretrained))
    reading = _reading(settled, features=config, tokenizer=tokenizer, world=world)
    stepper = Stepper(
        engine,
        passes=_passes(settled, engine, features=features, world=world),
        batches=train_batches(settled.train, plan=_train_plan(settled, reading, state=state, world=world)),
        learning_rate=None if engine.has_json_scheduler else _schedule(settled),
        accumulation=resolved.accumulation,
        stop_requested=stop_requested,
        skip_limit=SkipLimit(
            num_samples=settled.train.num_samples,
            max_bad_fraction=run.data.max_bad_fraction,
            largest_shard=int(settled.train.sizes.max()),
        ),
        world=world,
    )
    return Trainer(
        engine,
        stepper=stepper,
        hooks=list(
            _hooks(settled, reading, features=features, tokenizer=tokenizer, start_step=state.step, world=world)
        ),
        state=state,
        plan=settled.plan,
        world=world,
        run_dir=settled.directory.path,
        stop_requested=stop_requested,
    )


def _told_compute(threads: int, world: World) -> str:
    tf32 = (
        "" if world.device.type == "cpu" else "; TF32: not in fp32 matrix products (write bf16 into the JSON for speed)"
    )
    return f"threads: {threads} a rank, {world.local_size} ranks on this host{tf32}"


def _check_stored(settled: Settled, features: FeatureConfig, *, weights: str | None) -> None:
    """What lies on disk and does not fit: shards for another kind of model, a part of LAION's heads."""
    for index in (settled.train, settled.val):
        if index is not None:
            check_stored_kind(index, truncation=features.truncation)
    if weights is not None and settled.run.objective.mlp == "auto":
        stores_heads(Path(weights))


def _passes(settled: Settled, engine: Engine, *, features: ClapFeatures, world: World) -> Passes:
    """One pass where a micro batch has all the negatives that are wanted, else two with cached embeddings."""
    chosen = settled.run.objective
    objective = RunObjective(ObjectiveConfig.of(chosen), gather=chosen.negatives != "local")
    forward = Forward(engine, features=features, seed=settled.run.train.seed, world=world)
    if needs_caching(chosen.negatives, accumulation=settled.resolved.accumulation):
        return CachedPasses(forward, objective=objective)
    return MicroPasses(forward, objective=objective)


def _train_plan(settled: Settled, reading: dict[str, Any], *, state: TrainState, world: World) -> LoaderPlan:
    run, resolved = settled.run, settled.resolved
    prefetch = LoaderPlan.prefetch
    if needs_caching(run.objective.negatives, accumulation=resolved.accumulation):
        prefetch = batches_ahead(
            reading["features"],
            micro_batch=resolved.micro_batch,
            accumulation=resolved.accumulation,
            workers=reading["workers"],
            max_seconds=run.data.max_seconds,
        )
    return LoaderPlan(
        **reading,
        micro_batch=resolved.micro_batch,
        accumulation=resolved.accumulation,
        position=DataPosition(epoch=state.epoch, offset=state.offset),
        shuffle_shards=run.data.shuffle_shards,
        blacklist=run.data.blacklist,
        prefetch=prefetch,
    )


def _reading(settled: Settled, *, features: FeatureConfig, tokenizer: Path | None, world: World) -> dict[str, Any]:
    """What is alike in the plans of training and of evaluation."""
    run = settled.run
    hang_timeout_s = run.distributed.hang_timeout_s
    return {
        "rank": world.rank,
        "world_size": world.size,
        "features": features,
        "seed": run.train.seed,
        "tokenizer_path": None if tokenizer is None else str(tokenizer),
        "max_caption_tokens": run.data.max_caption_tokens,
        "policy": policy_of(run.data),
        "max_seconds": run.data.max_seconds,
        "max_bad_fraction": run.data.max_bad_fraction,
        "workers": _num_workers(settled, world),
        "pin_memory": world.device.type == "cuda",
        # Sooner than the ranks give each other up: this rank knows which process it waits for.
        "stall_timeout_s": None if hang_timeout_s is None else SOONER * hang_timeout_s,
    }


def _num_workers(settled: Settled, world: World) -> int:
    """auto: the cores that the rank itself does not need; on CPU ranks the rank computes with all it has."""
    workers = settled.run.data.workers
    if workers == "auto":
        return 0 if world.device.type == "cpu" else min(MOST_WORKERS, max(1, cores_per_rank(world) - 1))
    return workers


def _schedule(settled: Settled) -> Schedule:
    train = settled.run.train
    return Schedule(
        peak=train.learning_rate,
        minimum=train.min_learning_rate,
        warmup_steps=train.warmup_steps,
        max_steps=settled.plan.max_steps,
        kind=train.schedule,
    )


def _hooks(
    settled: Settled,
    reading: dict[str, Any],
    *,
    features: ClapFeatures,
    tokenizer: Path | None,
    start_step: int,
    world: World,
) -> Iterator[Hook]:
    """In the order in which they run: a step is on record before anything that can fail happens after it."""
    run, directory = settled.run, settled.directory
    metrics = MetricsHook(directory.metrics_path, attempt=settled.attempt) if world.is_main else None
    console = ConsoleHook(every_steps=run.log.every_steps)
    if metrics is not None:
        yield metrics
    if run.data.log_keys is not None:
        yield KeysHook(Path(run.data.log_keys), rank=world.rank, attempt=settled.attempt)
    if world.is_main:
        yield console
        yield WandbHook(
            directory.path,
            mode=run.wandb.mode,
            settings={
                "project": run.wandb.project,
                "name": run.wandb.name or directory.path.resolve().name,
                "entity": run.wandb.entity,
            },
            config={
                "run": public_config(run.model_dump(mode="json")),
                "deepspeed": settled.resolved.config,
                "world_size": world.size,
                **asdict(settled.plan),
            },
            attempt=settled.attempt,
            hide_command=holds_secrets(run.model_dump(mode="json")),
        )
    # Of all ranks, though only rank 0 tells.
    hosts = collectives.all_gather_objects(socket.gethostname())
    if world.is_main:
        yield SpeedHook(hosts, say=console.say)
    yield DataHook(
        directory.path / "skipped",
        rank=world.rank,
        attempt=settled.attempt,
        set_names=[data_set.name for data_set in settled.train.sets],
        metrics=metrics,
        say=console.say,
    )
    yield CheckpointHook(
        CheckpointStore(directory.checkpoints_path),
        every_steps=run.checkpoint.every_steps,
        keep=run.checkpoint.keep,
        last_saved=start_step if settled.resumes_itself else None,
        companions=companions(reading["features"], tokenizer),
    )
    if settled.val is not None:
        plan = LoaderPlan(**reading, micro_batch=run.evaluate.batch_size)
        val = settled.val
        yield EvaluateHook(
            lambda: eval_batches(val, plan=plan),
            features=features,
            every_steps=run.evaluate.every_steps,
            max_bad_fraction=run.data.max_bad_fraction,
        )
    if metrics is not None:
        yield EndHook(metrics)  # what the others do at the end is on record before it
