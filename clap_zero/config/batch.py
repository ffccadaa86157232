"""Batch arithmetic: micro x accumulation x world = global. The only place that does it.

Memory rule for micro batch "auto". A rank needs

    FIXED_BYTES * parameters + PROCESS_BYTES + pairs * bytes_per_pair * TEMPORARIES * (LOW_PRECISION under bf16 or fp16)

FIXED_BYTES are 2 of weights, 4 of fp32 weights, 8 of Adam's moments, 4 of gradients, 2 of communication buffers;
nothing is subtracted for partitioning, so that "auto" does not change with the stage; planning/memory.py does subtract,
and counts the rest part by part. `bytes_per_pair` was counted with torch.autograd.graph.saved_tensors_hooks: storage
that autograd keeps for one more 10 s clip (longer than 10 s in fused models) with 77 tokens, in fp32 training mode.
With checkpointing it is what stays between the layers, plus all of the layer that is recomputed at one time (the
largest stage of HTSAT). TEMPORARIES stands for what autograd does not keep: gradients of activations and kernels'
workspace. Where a step embeds its micro batches twice, the log-mels of all of them stay on the device: `held_bytes`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from clap_zero.config.objective import needs_caching
from clap_zero.config.preset import Preset, fuses
from clap_zero.errors import ConfigError

if TYPE_CHECKING:
    from clap_zero.config.schema import RunConfig

TEMPORARIES = 1.5
LOW_PRECISION = 0.6
FIXED_BYTES = 20
PROCESS_BYTES = 1_000_000_000
MEMORY_SHARE = 0.8
"""Share of a rank's memory that is planned for."""
MEL_BYTES = 4 * 1001 * 64
"""Log-mel of 10 s, fp32, as every preset has it: frames x bands. With fusion there are four of them."""
MIN_PAIRS = 2
"""Smallest micro batch that "auto" chooses: BatchNorm on a rank needs two values."""
MOST_PAIRS = 2**24
"""Largest batch, far above what anybody compares in one step: what is written there may be a slip."""
MIN_STEPS_PER_EPOCH = 4
"""A target that nobody asked for is lowered until an epoch has this many steps."""

KEYS = {
    "micro": "train_micro_batch_size_per_gpu",
    "accumulation": "gradient_accumulation_steps",
    "whole": "train_batch_size",
}


@dataclass(frozen=True)
class Batch:
    """Three numbers of pairs or passes; None is a number that is still open.

    Attributes:
        micro: pairs per forward and rank.
        accumulation: forwards per optimizer step.
        whole: pairs per optimizer step, over all ranks: the global batch.
    """

    micro: int | None = None
    accumulation: int | None = None
    whole: int | None = None

    def sum(self, world_size: int) -> str:
        """The arithmetic as it is printed."""
        return f"micro {self.micro} x accumulation {self.accumulation} x world {world_size} = global {self.whole}"


def largest_micro_batch(
    preset: Preset, *, memory_bytes: int, checkpointing: bool, low_precision: bool, held: int = 0
) -> int | None:
    """Pairs that fit into a rank by the memory rule above; None where the memory is not known (0 bytes).

    Args:
        preset: of the model.
        memory_bytes: of the rank.
        checkpointing: whether activations are recomputed.
        low_precision: whether the forward is in bf16 or fp16.
        held: `held_bytes` of the step.
    """
    if memory_bytes <= 0:
        return None
    pair_bytes = activation_bytes(preset, num_pairs=1, checkpointing=checkpointing, low_precision=low_precision)
    room_bytes = MEMORY_SHARE * memory_bytes - FIXED_BYTES * preset.num_parameters - PROCESS_BYTES - held
    return max(0, int(room_bytes // pair_bytes))


def activation_bytes(preset: Preset, *, num_pairs: int, checkpointing: bool, low_precision: bool) -> int:
    """Memory of a micro batch's activations at the peak, in the backward, by the memory rule above."""
    pair = preset.bytes_per_pair_checkpointed if checkpointing else preset.bytes_per_pair
    return int(num_pairs * pair * TEMPORARIES * (LOW_PRECISION if low_precision else 1.0))


def held_bytes(run: RunConfig, *, micro_batch: int, accumulation: int) -> int:
    """Memory of what a step keeps on the device between its two passes: the log-mels of a rank's pairs.

    Args:
        run: of the step; its negatives decide whether there are two passes, its model and data how large a log-mel is.
        micro_batch: pairs per forward and rank.
        accumulation: forwards per optimizer step.
    """
    if not needs_caching(run.objective.negatives, accumulation=accumulation):
        return 0
    truncation = run.data.truncation
    fused = fuses(run.model.preset, pretrained=run.model.pretrained) if truncation == "auto" else truncation == "fusion"
    return micro_batch * accumulation * MEL_BYTES * (4 if fused else 1)


def fill_batch(
    given: Batch, *, world_size: int, target: int, largest_micro: int | None, num_samples: int
) -> tuple[Batch, list[str]]:
    """Fills what is open. Pure, so that the same command gives the same batch.

    Args:
        given: numbers that somebody decided; None where open.
        world_size: ranks.
        target: global batch to aim at when it is open.
        largest_micro: micro batch that memory allows, None if not known; bounds only what is open.
        num_samples: training pairs there are, 0 if not known.

    Returns:
        The batch with all numbers set, and lines that say why.

    Raises:
        ConfigError: the numbers contradict each other or the data; with the sum.
    """
    for name, number in (("micro", given.micro), ("accumulation", given.accumulation), ("whole", given.whole)):
        if number is not None and number < 1:
            raise ConfigError(f'{KEYS[name]} is {number}, at least 1 is needed (or "auto")')
        if number is not None and number > MOST_PAIRS:
            raise ConfigError(f"{KEYS[name]} is {number}, at most {MOST_PAIRS} is possible")
    why: list[str] = []
    if given.whole is None and (given.micro is None or given.accumulation is None):
        aim = _lowered_target(target, world_size=world_size, num_samples=num_samples, why=why)
        batch = _toward(given, aim, world_size=world_size, largest_micro=largest_micro, why=why)
    else:
        batch = _derived(given, world_size=world_size, largest_micro=largest_micro, why=why)
    _check_against_data(batch, world_size=world_size, num_samples=num_samples)
    return batch, [batch.sum(world_size), *why]


def kept_micro(recorded: Batch, *, world_size: int, over_ranks: bool, largest_micro: int | None) -> int | None:
    """The micro batch of a continued run, so that what belongs together in a pass stays together on other ranks, too.

    Args:
        recorded: of the run; its global batch stays.
        world_size: ranks now.
        over_ranks: whether what belongs together (BatchNorm) spans the ranks: their micro batches together should stay
            as large as they were, where memory allows. Otherwise each should.
        largest_micro: micro batch that memory allows, None if not known.

    Returns:
        None where neither can stay.
    """
    micro, accumulation, whole = recorded.micro, recorded.accumulation, recorded.whole
    assert whole is not None
    if over_ranks and micro is not None and accumulation is not None and whole % (accumulation * world_size) == 0:
        other = whole // (accumulation * world_size)
        if MIN_PAIRS <= other <= max(micro, largest_micro or 0):
            return other
    return micro if micro is not None and whole % (micro * world_size) == 0 else None


def refuse_unequal_share(recorded: Batch, *, world_size: int) -> None:
    """A continued run keeps its global batch, so its ranks have to be able to share it. Raises ConfigError.

    Args:
        recorded: with the global batch of the run, and what else was given now.
        world_size: ranks.
    """
    assert recorded.whole is not None
    given = [
        f" x {what} {number}"
        for what, number in (("micro", recorded.micro), ("accumulation", recorded.accumulation))
        if number is not None
    ]
    if recorded.whole % (world_size * (recorded.micro or 1) * (recorded.accumulation or 1)):
        way_out = "another number of ranks" + (" or another micro batch" if given else "")
        raise ConfigError(
            f"this run takes {recorded.whole} pairs a step (train_batch_size in its ds_config.json), which is not a "
            f"multiple of {world_size} ranks{''.join(given)}: start it with {way_out}"
        )


def _lowered_target(target: int, *, world_size: int, num_samples: int, why: list[str]) -> int:
    smallest = MIN_PAIRS * world_size
    if 0 < num_samples < smallest:
        raise ConfigError(
            f"{num_samples} training pairs are too few for {world_size} ranks with {MIN_PAIRS} each: "
            "add data to --data.train or start fewer ranks"
        )
    lowered = target
    if num_samples > 0 and target > num_samples // MIN_STEPS_PER_EPOCH:
        lowered = max(smallest, num_samples // MIN_STEPS_PER_EPOCH)
        if lowered < target:
            why.append(
                f"global batch at most {lowered} instead of {target}: {num_samples} pairs shall give "
                f"{MIN_STEPS_PER_EPOCH} steps an epoch where they can"
            )
    return max(smallest, min(target, lowered))


def _toward(given: Batch, aim: int, *, world_size: int, largest_micro: int | None, why: list[str]) -> Batch:
    """The global batch is open: as near to `aim` from below as the given number and memory let it be."""
    per_rank = max(MIN_PAIRS, aim // world_size)
    if given.micro is not None:
        micro, accumulation = given.micro, max(1, per_rank // given.micro)
    elif given.accumulation is not None:
        accumulation = given.accumulation
        micro = _bounded(max(MIN_PAIRS, per_rank // accumulation), largest_micro, why)
    else:
        most = _bounded(per_rank, largest_micro, why)
        accumulation = -(-per_rank // most)
        micro = max(MIN_PAIRS, per_rank // accumulation)
    return Batch(micro, accumulation, micro * accumulation * world_size)


def _bounded(micro: int, largest_micro: int | None, why: list[str]) -> int:
    if largest_micro is None or micro <= largest_micro:
        return micro
    if largest_micro < MIN_PAIRS:
        why.append(
            f"micro {MIN_PAIRS} although the estimate says that a rank has not the memory for it: switch activation "
            "checkpointing on where it is off (--ds.activation_checkpointing '{}')"
        )
        return MIN_PAIRS
    why.append(f"micro at most {largest_micro}: what the smallest memory of a rank holds by the estimate")
    return largest_micro


def _derived(given: Batch, *, world_size: int, largest_micro: int | None, why: list[str]) -> Batch:
    """At least two numbers, or the global batch, are given: the rest must come out whole."""
    micro, accumulation, whole = given.micro, given.accumulation, given.whole
    if micro is not None and accumulation is not None:
        product = micro * accumulation * world_size
        if whole is not None and whole != product:
            raise ConfigError(
                f"train_batch_size {whole} is not train_micro_batch_size_per_gpu {micro} x gradient_accumulation_steps "
                f'{accumulation} x world size {world_size} = {product}: change one of them or set one to "auto"'
            )
        return Batch(micro, accumulation, product)
    assert whole is not None, "fill_batch sends an open global batch elsewhere"
    known = micro if micro is not None else accumulation
    if known is not None:
        if whole % (known * world_size):
            name = KEYS["micro" if micro is not None else "accumulation"]
            below, step = whole - whole % (known * world_size), known * world_size
            near = f"{below} or {below + step}" if below else f"{step}"
            raise ConfigError(
                f"train_batch_size {whole} is not a multiple of {name} {known} x world size {world_size} = {step}: "
                f"set it to {near}, or change {name}"
            )
        other = whole // (known * world_size)
        return Batch(known, other, whole) if micro is not None else Batch(other, known, whole)
    if whole % world_size:
        below = whole - whole % world_size
        near = f"{below} or {below + world_size}" if below else f"{world_size}"
        raise ConfigError(
            f"train_batch_size {whole} is not a multiple of the world size {world_size}: set it to {near}"
        )
    return _divided(replace(given, whole=whole), world_size=world_size, largest_micro=largest_micro, why=why)


def _divided(given: Batch, *, world_size: int, largest_micro: int | None, why: list[str]) -> Batch:
    """Only the global batch is given: the largest micro batch that divides a rank's share and fits its memory."""
    assert given.whole is not None
    per_rank = given.whole // world_size
    most = _bounded(per_rank, largest_micro, why)
    fitting = [micro for micro in range(min(MIN_PAIRS, per_rank), most + 1) if per_rank % micro == 0]
    if not fitting:
        raise ConfigError(
            f"train_batch_size {given.whole} gives each of {world_size} ranks {per_rank} pairs, which cannot be split "
            f"into equal micro batches of {MIN_PAIRS} to {most}: choose a global batch with more divisors, such as "
            f"{world_size * most * max(1, per_rank // most)}"
        )
    return Batch(fitting[-1], per_rank // fitting[-1], given.whole)


def _check_against_data(batch: Batch, *, world_size: int, num_samples: int) -> None:
    assert batch.whole is not None
    if 0 < num_samples < batch.whole:
        raise ConfigError(
            f"the global batch is {batch.sum(world_size)}, but there are {num_samples} training pairs: an epoch would "
            "have no step. Lower --train.global_batch_size or train_batch_size, or add data"
        )
