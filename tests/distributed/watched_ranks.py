"""One rank of a small job under the watchdog, without DeepSpeed: `python watched_ranks.py SCENE FOLDER`."""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from clap_zero.config.schema import DistributedSection
from clap_zero.distributed import collectives, hub
from clap_zero.distributed.world import World
from clap_zero.hooks.watchdog import Watchdog
from clap_zero.phases import phase, set_step

TIMEOUT_S = {"late": 1.0, "late_collective": 1.0}
"""Longest wait in a collective by scene; else longer than any test."""


def kill(rank: int, size: int) -> None:
    """The last rank is killed while the others wait in a collective for it."""
    if rank == size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def stop(rank: int, size: int) -> None:
    """The last rank is stopped as a whole: neither beats nor signals get through."""
    if rank == size - 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(1))


def stuck_in_c(rank: int, size: int) -> None:
    """The last rank holds Python's lock for ever, and no launcher is there to kill it."""
    if rank == size - 1:
        import ctypes

        while True:  # the question for the stacks wakes it up
            ctypes.PyDLL(None).sleep(10_000)
    dist.all_reduce(torch.ones(1))


def leave(rank: int, size: int) -> None:
    """The last rank ends with 0 while the others go on."""
    if rank == size - 1:
        os._exit(0)
    dist.all_reduce(torch.ones(1))


def fail(rank: int, size: int) -> None:
    """The last rank has an error, which it announces as the trainer does."""
    if rank == size - 1:
        hub.announce_failure("in backward of step 7: shard 12 is torn", exit_code=3)
        time.sleep(1)
        os._exit(3)
    dist.all_reduce(torch.ones(1))


def hang(rank: int, size: int) -> None:
    """Rank 1 never comes back from its data."""
    if rank == 1:
        with phase("data"):
            time.sleep(10_000)
    dist.all_reduce(torch.ones(1))


def busy(rank: int, size: int) -> None:
    """The last rank holds Python's lock for long, but not for too long."""
    if rank == size - 1:
        import ctypes

        ctypes.PyDLL(None).sleep(2)
    _done(rank)


def suspend(rank: int, size: int) -> None:
    """Nothing happens: the test stops the whole job meanwhile."""
    time.sleep(8)
    _done(rank)


def broken_watch(rank: int, size: int) -> None:
    """The watch of the last rank breaks, and the run goes on for longer than a rank may be silent."""
    if rank == size - 1:
        hub._station.decide = None
    time.sleep(5)
    _done(rank)


def _done(rank: int) -> None:
    dist.all_reduce(torch.ones(1))
    with phase("end"):
        hub.say_goodbye()
    print(f"rank {rank} done", flush=True)
    os._exit(0)


def late_collective(rank: int, size: int) -> None:
    """The same without a patient wait: what `late` is spared."""
    time.sleep(3 * TIMEOUT_S["late"] if rank == 0 else 0)
    dist.all_reduce(torch.ones(1))


def late(rank: int, size: int) -> None:
    """Rank 0 is busy for longer than a collective may wait."""
    with phase("evaluation"):
        time.sleep(3 * TIMEOUT_S["late"] if rank == 0 else 0)
        assert collectives.all_gather_objects(rank) == list(range(size))
        assert collectives.broadcast_object(rank) == 0
    dist.all_reduce(torch.ones(1))
    with phase("end"):
        hub.say_goodbye()
        time.sleep(0.2 * rank)
    print(f"rank {rank} done", flush=True)
    os._exit(0)


ENDED = (kill, stop, stuck_in_c, leave, fail, hang, late_collective)
SURVIVED = (late, busy, suspend, broken_watch)
SCENES = {scene.__name__: scene for scene in (*ENDED, *SURVIVED)}


def main() -> None:
    scene, folder = sys.argv[1], Path(sys.argv[2])
    watchdog = Watchdog(parent=os.getppid()).start().take_signals()
    limit = timedelta(seconds=TIMEOUT_S.get(scene, 600))
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    # For all collectives from now on; torch 2.14 renamed it.
    getattr(dist, "set_timeout", dist.distributed_c10d._set_pg_timeout)(limit, dist.group.WORLD)
    world = World(rank, size, rank, size, torch.device("cpu"))
    heartbeat_s = 3.0 if scene in ("stop", "stuck_in_c", "busy", "suspend", "broken_watch") else 30.0
    limits = DistributedSection(heartbeat_timeout_s=heartbeat_s, hang_timeout_s=3.0 if scene == "hang" else 600.0)
    watchdog.watch_ranks(world, limits=limits, run_dir=folder)
    dist.all_reduce(torch.ones(1))
    (folder / f"ready{rank}").touch()
    set_step(7)
    try:
        with phase("backward"):
            time.sleep(1.2 if rank == size - 1 else 0)  # until the others wait, and know what this one does
            SCENES[scene](rank, size)
    except RuntimeError as error:  # a lost peer: as the trainer does, give the watchdog time to say why
        time.sleep(5)
        print(f"rank {rank} was not told why: {error}", flush=True)
        os._exit(1)


main()
