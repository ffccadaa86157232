"""A run told as a numbered story before its first step, each derived number with where it comes from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from clap_zero.checkpoint.state import Layout
from clap_zero.config.objective import told_objective
from clap_zero.data.index import ShardIndex
from clap_zero.distributed.world import World

if TYPE_CHECKING:
    from clap_zero.training.prepare import Settled


def told_run(settled: Settled, *, world: World) -> list[str]:
    """The run as a numbered story, each derived number with where it comes from."""
    run, resolved, plan = settled.run, settled.resolved, settled.plan
    left_over = plan.num_samples - plan.steps_per_epoch * plan.global_batch
    return [
        *resolved.explanation,
        *told_idle(world.size, torch.cuda.device_count() if world.device.type == "cuda" else 0),
        *told_data(settled.train, settled.val),
        f"length: {plan.max_steps} optimizer steps, {plan.steps_per_epoch} an epoch; {left_over} pairs of each epoch, "
        "others each time, do not fill a step",
        *told_objective(resolved, world_size=world.size),
        f"BatchNorm: {run.model.batch_norm}{_told_group(settled, world_size=world.size)}",
        f"run: {run.run_dir}, attempt {settled.attempt}, "
        + ("from step 0" if settled.resume_from is None else f"resumed from {settled.resume_from}"),
        *_told_conversion(settled, world_size=world.size),
    ]


def told_idle(world_size: int, num_devices: int) -> list[str]:
    """A warning where a program was started without a launcher on a machine with several devices.

    Args:
        world_size: Ranks.
        num_devices: That this process sees.
    """
    if world_size > 1 or num_devices < 2:
        return []
    return [
        f"warning: one rank, on one of {num_devices} GPUs: `deepspeed --num_gpus {num_devices} -m clap_zero.train ...` "
        "(or torchrun) takes them all; CUDA_VISIBLE_DEVICES=0 says that one is meant"
    ]


def _told_group(settled: Settled, *, world_size: int) -> str:
    """What a BatchNorm in training is computed over; on other ranks it may be another group."""
    micro = settled.resolved.micro_batch
    return {
        "sync": f", over the {micro * world_size} pairs of a micro batch on all ranks",
        "local": f", over the {micro} pairs of a rank's micro batch",
        "frozen": "",
    }[settled.run.model.batch_norm]


def _told_conversion(settled: Settled, *, world_size: int) -> list[str]:
    saved_by, resolved = settled.saved_by, settled.resolved
    if saved_by is None:
        return []
    here = Layout(world_size, resolved.stage, resolved.precision)
    line = f"its optimizer state is converted from {saved_by} to {here}"
    if settled.run.model.batch_norm == "local" and saved_by.world_size not in (1, world_size):
        line += f"; each rank begins with the mean of {saved_by.world_size} ranks' BatchNorm statistics"
    return [line]


def told_data(train: ShardIndex, val: ShardIndex | None) -> list[str]:
    """What the data are: in all, and set by set where there are several."""
    lines = [
        f"data: {train.num_samples} training pairs an epoch in {train.num_shards} shards, "
        f"{0 if val is None else val.num_stored} held out"
    ]
    if len(train.sets) > 1 or train.sets[0].weight != 1:
        for one in train.sets:
            share = one.num_samples / train.num_samples
            lines.append(
                f"data set {one.name}: {one.num_stored} pairs x weight {one.weight:g} = {one.num_samples}, "
                f"{share:.1%} of an epoch"
            )
    return lines


def told_overlap(both: list[str]) -> list[str]:
    """A warning about shards that are trained on and held out, if there are any."""
    if not both:
        return []
    return [
        f"warning: {len(both)} shards stand in data.train and in data.val, such as {both[0]}: the evaluation tells "
        "nothing about pairs that were not trained on"
    ]
