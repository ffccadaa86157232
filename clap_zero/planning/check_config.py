"""`clap-zero check-config`: a whole run, resolved and told, on a machine that need not be the one that trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from clap_zero.config.data import DataSection
from clap_zero.config.deepspeed import Machine, ResolvedDeepSpeed, load_ds_json, resolve
from clap_zero.config.load import CommandLine, parse_command_line
from clap_zero.config.objective import told_objective
from clap_zero.config.own_flags import take_own
from clap_zero.config.preset import load_preset
from clap_zero.errors import ConfigError
from clap_zero.planning.memory import estimate_memory, told_accuracy
from clap_zero.planning.schedule import told_schedule

OWN_FLAGS = {"world_size": "1", "num_samples": "", "memory_gb": "0", "device": ""}
"""The flags that are not those of `train`, with their defaults as they would be typed."""

HELP = """\
usage: clap-zero check-config --ds_config FILE [--world-size N] [--num-samples N] [--memory-gb X] [--device cpu|cuda]
                              [TRAIN_FLAGS ...]
       clap-zero check-config --schema

Checks the flags of a `train` command (`clap-zero train --help` lists them) and prints what they come to: the batch
arithmetic, what is in force, the memory of a rank by part, the size of a checkpoint, the steps of an epoch, the
schedule. Starts no rank and builds no model. Whether the device can do the precision that the DeepSpeed JSON asks for
is seen only there.

  --world-size N     ranks of the run; default 1
  --num-samples N    training pairs; default: those of --data.train, or not known
  --memory-gb X      memory that one rank may use; unit GB, default not known (it then bounds nothing)
  --device NAME      cpu or cuda; default: what this machine has
  --schema           print the JSON Schema of the run config, for editors, and end
"""


@dataclass(frozen=True)
class Place:
    """Where the run would take place.

    Attributes:
        world_size: ranks.
        num_samples: training pairs, None to count those of data.train.
        memory_bytes: memory of a rank; 0 if not known.
        device_type: "cpu" or "cuda".
    """

    world_size: int
    num_samples: int | None
    memory_bytes: int
    device_type: str


def read_place(argv: Sequence[str], *, device_here: Callable[[], str]) -> tuple[Place, list[str]]:
    """Takes the command's own flags out of a command line that is otherwise that of `train`.

    Args:
        argv: arguments after `check-config`.
        device_here: says what this machine has, "cpu" or "cuda"; called where --device is not given.

    Returns:
        The place, and the arguments that are left.

    Raises:
        ConfigError: a value that a flag cannot have.
    """
    own, rest = take_own(argv, OWN_FLAGS)
    device = own["device"] or device_here()
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"--device {device}: cpu and cuda are possible")
    place = Place(
        world_size=_whole("--world-size", own["world_size"], least=1),
        num_samples=_whole("--num-samples", own["num_samples"]) if own["num_samples"] else None,
        memory_bytes=int(_real("--memory-gb", own["memory_gb"]) * 1e9),
        device_type=device,
    )
    return place, rest


def _whole(flag: str, text: str, *, least: int = 0) -> int:
    if not text.isdecimal() or int(text) < least:
        raise ConfigError(f"{flag} {text}: a whole number of at least {least} is needed")
    return int(text)


def _real(flag: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9:
        raise ConfigError(f"{flag} {text}: a number of gigabytes is needed")
    return value


def checked(command: CommandLine, place: Place) -> tuple[ResolvedDeepSpeed, int]:
    """Resolves a command for a place. Raises ConfigError or DataError.

    Returns:
        The run, and how many training pairs there are, 0 if not known.
    """
    num_samples = _count_samples(command.run.data) if place.num_samples is None else place.num_samples
    machine = Machine(memory_bytes=place.memory_bytes, num_samples=num_samples, device_type=place.device_type)
    ds = load_ds_json(command.ds_path, command.ds_overrides)
    resolved = resolve(ds, command.run, world_size=place.world_size, machine=machine, explicit=command.explicit)
    return resolved, num_samples


def _count_samples(data: DataSection) -> int:
    if not data.train:
        return 0
    from clap_zero.data.index import index_of  # reads the shards' index: only where there are some

    return index_of(data.train, data).num_samples


def told(argv: Sequence[str], *, device_here: Callable[[], str]) -> list[str]:
    """The lines of `clap-zero check-config ARGV`.

    Args:
        argv: arguments after `check-config`.
        device_here: says what this machine has.

    Raises:
        ClapZeroError: what `train` would refuse before it builds a model.
    """
    place, rest = read_place(argv, device_here=device_here)
    command = parse_command_line(rest, has_gpu=place.device_type != "cpu")
    resolved, num_samples = checked(command, place)
    lines = [
        f"for {place.world_size} ranks on {place.device_type} (--world-size and --device say otherwise)",
        *command.notes,
        *resolved.explanation,
        *told_objective(resolved, world_size=place.world_size),
        *_told_memory(command, resolved, place),
        _told_length(resolved, num_samples=num_samples),
        told_schedule(resolved),
        f"optimizer: {resolved.config['optimizer']['type']}, learning rate {resolved.run.train.learning_rate:g}, "
        f"weight decay {resolved.run.train.weight_decay:g}",
    ]
    return [*lines, f"run directory {command.run.run_dir}"]


def _told_length(resolved: ResolvedDeepSpeed, *, num_samples: int) -> str:
    if not num_samples:
        length = "not known without --num-samples" if resolved.total_steps is None else f"{resolved.total_steps}"
        return f"optimizer steps {length}, warm-up {resolved.run.train.warmup_steps}"
    steps = num_samples // resolved.global_batch
    left_over = num_samples - steps * resolved.global_batch
    return (
        f"optimizer steps {resolved.total_steps}, warm-up {resolved.run.train.warmup_steps}; {num_samples} pairs make "
        f"{steps} steps an epoch, {left_over} of them, others each time, do not fill a step"
    )


def _told_memory(command: CommandLine, resolved: ResolvedDeepSpeed, place: Place) -> Iterator[str]:
    preset = load_preset(command.run.model.preset)
    estimate = estimate_memory(resolved, preset=preset, world_size=place.world_size, device_type=place.device_type)
    model = "of the usual size" if command.run.model.preset is None else f"of {preset.num_parameters / 1e6:.1f} M"
    yield (
        f"memory of a rank, model {model} parameters: about {gigabytes(estimate.device_bytes)} GB = "
        f"{_parts(estimate.device)} ({told_accuracy(resolved, device_type=place.device_type)})"
    )
    if estimate.host:
        yield f"host memory beside it: {gigabytes(estimate.host_bytes)} GB a rank = {_parts(estimate.host)}"
    if estimate.disk:
        yield f"on the NVMe disk: {_parts(estimate.disk)} GB a rank"
    if place.memory_bytes and estimate.device_bytes > place.memory_bytes:
        recompute = "" if resolved.activation_checkpointing else "--ds.activation_checkpointing '{}' (recomputes), "
        yield (
            f"warning: that is more than the {gigabytes(place.memory_bytes)} GB of a rank: lower "
            f"--ds.train_micro_batch_size_per_gpu, {recompute}--ds.zero_optimization.stage 3, or offload "
            "(--ds.zero_optimization.offload_optimizer.device cpu)"
        )
    yield f"one checkpoint: {gigabytes(estimate.checkpoint)} GB, at most {command.run.checkpoint.keep + 1} at a time"


def _parts(parts: Mapping[str, int]) -> str:
    return " + ".join(f"{name} {gigabytes(size)}" for name, size in parts.items() if size)


def gigabytes(size_bytes: int) -> str:
    """Two digits that matter: 0.0076, 1.5, 24."""
    size = size_bytes / 1e9
    return f"{size:.0f}" if size >= 9.95 else f"{size:.2g}"
