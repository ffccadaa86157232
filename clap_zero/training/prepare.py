"""Everything that is settled before a model is built: data, DeepSpeed configuration, length, run directory.

Rank 0 reads and writes the files; the other ranks get its result, or its error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from clap_zero.checkpoint.state import Layout, conversion
from clap_zero.checkpoint.store import CheckpointStore
from clap_zero.config.deepspeed import Machine, ResolvedDeepSpeed, load_ds_json, resolve
from clap_zero.config.load import CommandLine, dump_run_config
from clap_zero.config.schema import RunConfig
from clap_zero.data.blacklist import told_counts
from clap_zero.data.embedded import embedded_sounds
from clap_zero.data.index import ShardIndex, index_of
from clap_zero.data.overlap import shards_in_both
from clap_zero.data.partition import steps_per_epoch
from clap_zero.data.public import holds_secrets
from clap_zero.distributed import collectives
from clap_zero.distributed.world import World, memory_bytes, supported_precisions
from clap_zero.errors import ClapZeroError, ConfigError, DataError, LaunchError, first_line
from clap_zero.preflight.ranks import check_ranks
from clap_zero.preflight.shared import check_data, check_shared_directory
from clap_zero.training.loop import Plan
from clap_zero.training.run_directory import RunDirectory, RunLock
from clap_zero.training.say import say
from clap_zero.training.story import told_overlap, told_run

LOCK_WAIT_S = 20.0
"""How long the processes of a killed job may take to go away before a new one gives up."""

T = TypeVar("T")


@dataclass(frozen=True)
class Settled:
    """What a run is, equal on all ranks.

    Attributes:
        run: The run config, complete.
        resolved: The checked DeepSpeed configuration.
        train: The training shards.
        val: The held-out shards, None without any.
        data: Fingerprints and sizes of the data.
        plan: The length of the run.
        attempt: 1 for the first start of the run.
        resume_from: The checkpoint to load, None for a new run.
        saved_by: The layout that it is converted from, None where it fits as it is.
    """

    run: RunConfig
    resolved: ResolvedDeepSpeed
    train: ShardIndex
    val: ShardIndex | None
    data: dict[str, Any]
    plan: Plan
    attempt: int
    resume_from: Path | None
    saved_by: Layout | None

    @property
    def resumes_itself(self) -> bool:
        """Whether the checkpoint to load is this run's own, and not another's."""
        return self.resume_from is not None and self.resume_from.parent == self.directory.checkpoints_path

    @property
    def directory(self) -> RunDirectory:
        return RunDirectory(Path(str(self.run.run_dir)))

    def record(self) -> None:
        """Write down in the run directory what is settled. Not before the checkpoint that the run goes on from fits."""
        private = holds_secrets(self.run.model_dump(mode="json"))
        self.directory.record(run=dump_run_config(self.run), ds=self.resolved.config, data=self.data, private=private)


def prepare(command: CommandLine, *, world: World) -> tuple[Settled, RunLock] | None:
    """Check everything, take the run directory, and say what is settled.

    Collective: all ranks must call.

    Returns:
        What the run is and this rank's hold on its directory; None when the run is already finished.

    Raises:
        ClapZeroError: Something is wrong. The same error is raised on all ranks; rank 0 reports it.
    """
    directory = RunDirectory(Path(str(command.run.run_dir)))
    lock = RunLock(directory.path)
    for line in check_ranks(world):
        say_on_main(line, world=world)
    smallest_memory = min(collectives.all_gather_objects(memory_bytes(world)))
    try:
        settled = on_main(world, lambda: _settle(command, directory, lock, world=world, memory=smallest_memory))
        if settled is None:
            lock.release()
            return None
        for line in check_shared_directory(directory.path, world=world):
            say_on_main(line, world=world)
        check_data((settled.train, settled.val), world=world)
        if world.is_main:
            lock.share()
        collectives.barrier()
        if not world.is_main:
            lock.share()
    except ClapZeroError:
        lock.release()
        raise
    return settled, lock


def say_on_main(line: str, *, world: World) -> None:
    """Says a line once for the job."""
    if world.is_main:
        say(line)


def on_main(world: World, function: Callable[[], T]) -> T:
    """Run a function on rank 0 and give its result, or its error, to all ranks.

    Collective: all ranks must call.

    Raises:
        ClapZeroError: What the function raised on rank 0.
        Exception: What nobody foresaw, on rank 0 itself; the others get a LaunchError that names it.
    """
    result: Any = None
    error: ClapZeroError | None = None
    unforeseen: Exception | None = None
    if world.is_main:
        try:
            result = function()
        except ClapZeroError as raised:
            error = raised
        except OSError as raised:
            error = LaunchError(f"{raised.filename or 'the run directory'}: {raised.strerror or raised}")
        except Exception as raised:  # noqa: BLE001
            # The others wait for this broadcast; without it they would wait until their timeout.
            unforeseen = raised
            error = LaunchError(f"rank 0 failed unexpectedly: {type(raised).__name__}: {first_line(raised)}")
    result, error = collectives.broadcast_object((result, error))
    if unforeseen is not None:
        raise unforeseen  # with its traceback
    if error is not None:
        error.reported_elsewhere = not world.is_main
        raise error
    return result


def _settle(
    command: CommandLine, directory: RunDirectory, lock: RunLock, *, world: World, memory: int
) -> Settled | None:
    """Rank 0's part of `prepare`.

    Returns:
        None when the run is finished.
    """
    run, notes = with_data(command.run)
    train = index_of(run.data.train, run.data)
    val = index_of(run.data.val, run.data) if run.data.val else None
    ds = load_ds_json(command.ds_path, command.ds_overrides)
    if run.resume == "never":
        _make_room(directory, force=run.force)
    directory.create()
    lock.acquire_alone(wait_s=LOCK_WAIT_S)
    resolved = resolve(
        ds,
        run,
        world_size=world.size,
        machine=Machine(
            memory_bytes=memory,
            num_samples=train.num_samples,
            device_type=world.device.type,
            precisions=supported_precisions(),
        ),
        recorded=None if run.force else directory.recorded_ds_config(),
        explicit=command.explicit,
    )
    run = resolved.run
    plan = make_plan(resolved, train)
    data = {name: _summary(index) for name, index in (("train", train), ("val", val)) if index is not None}
    resume_from = _checkpoint_to_load(run, CheckpointStore(directory.checkpoints_path))
    saved_by = None
    if resume_from is not None:
        # Before the configurations are compared: other ranks change numbers there that nobody set.
        here = Layout(world.size, resolved.stage, resolved.precision)
        saved_by = conversion(resume_from, here, config=resolved.config)
    directory.check_unchanged(
        run=run.model_dump(mode="json"), ds=resolved.config, data=data, world_size=world.size, force=run.force
    )
    finished = directory.finished_step()
    if finished is not None and finished >= plan.max_steps:
        print(f"{directory.path} is already complete: {finished} steps. Give another --run_dir for a new run")
        return None
    settled = Settled(run, resolved, train, val, data, plan, directory.next_attempt(), resume_from, saved_by)
    if val is not None:
        notes += told_overlap(shards_in_both(train, val))
    notes += told_counts(run.data.blacklist)
    story = [*command.notes, *notes, *told_run(settled, world=world)]
    for number, line in enumerate(story, start=1):
        print(f"{number:2d}. {line}", flush=True)
    return settled


def _make_room(directory: RunDirectory, *, force: bool) -> None:
    """For `--resume never`: a directory that holds a run is refused, or with --force moved aside as a whole."""
    if not directory.checkpoints_path.exists() and not directory.metrics_path.exists():
        return
    if not force:
        raise ConfigError(
            f"--resume never, but {directory.path} holds a run: give another --run_dir, or add --force to move it aside"
        )
    held = RunLock(directory.path)
    held.acquire_alone(wait_s=LOCK_WAIT_S)
    print(f"moved the old run to {directory.set_aside()}", flush=True)
    held.release()


def with_data(run: RunConfig) -> tuple[RunConfig, list[str]]:
    """Fill in the embedded sounds where no data is named.

    Returns:
        The run config, and what was chosen, to be printed.
    """
    if run.data.train:
        return run, [] if run.data.val else ["no --data.val: nothing is held out, so nothing is evaluated"]
    train, val = embedded_sounds()
    chosen = {"train": (str(train),), "val": run.data.val or (str(val),)}
    data = run.data.model_copy(update=chosen)
    return run.model_copy(update={"data": data}), [f"data.train {train}: no data was named, so the embedded sounds"]


def make_plan(resolved: ResolvedDeepSpeed, train: ShardIndex) -> Plan:
    """The length of the run in optimizer steps.

    Raises:
        DataError: There are fewer samples than one global batch needs.
    """
    num_steps = steps_per_epoch(train.num_samples, resolved.global_batch)
    if num_steps == 0:
        raise DataError(
            f"{train.num_samples} training pairs are fewer than one global batch of {resolved.global_batch}: give more "
            "data, or lower train_micro_batch_size_per_gpu, gradient_accumulation_steps or the number of ranks"
        )
    assert resolved.total_steps is not None, "known as soon as the number of samples is"
    return Plan(
        max_steps=resolved.total_steps,
        steps_per_epoch=num_steps,
        num_samples=train.num_samples,
        global_batch=resolved.global_batch,
    )


def _checkpoint_to_load(run: RunConfig, store: CheckpointStore) -> Path | None:
    """The run's own newest complete checkpoint; before there is one, what --resume names.

    Raises:
        ConfigError: --resume names an older checkpoint of this run.
        CheckpointError: --resume names no complete checkpoint.
    """
    own = store.newest_complete()
    for rejected in store.rejected:
        print(f"clap_zero: warning: checkpoint passed over: {rejected}", flush=True)
    if run.resume in ("auto", "never"):
        return own
    named = CheckpointStore(Path(run.resume)).resolve(run.resume)
    if own is None or named is None or named.resolve() == own.resolve():
        return named
    if named.resolve().parent == own.resolve().parent:
        raise ConfigError(
            f"--resume {run.resume}: this run has gone on to {own.name}; to branch off from {named.name}, give another "
            "--run_dir beside --resume"
        )
    print(f"the run goes on from its own {own.name}; --resume {run.resume} was where it began", flush=True)
    return own


def _summary(index: ShardIndex) -> dict[str, Any]:
    return {"fingerprint": index.fingerprint, "num_shards": index.num_shards, "num_samples": index.num_samples}
