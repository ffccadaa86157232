"""The processes of a job: who we are, joining the others, leaving them.

The only reader of RANK, WORLD_SIZE and their relatives, and of our own environment variables.
"""

from __future__ import annotations

import contextlib
import os
import socket
import warnings
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch

from clap_zero.distributed import collectives, hub
from clap_zero.distributed.elastic import rendezvous_method
from clap_zero.distributed.place import DEFAULT_PORT, LaunchEnvironment
from clap_zero.distributed.place import describe_process as describe_process
from clap_zero.distributed.place import read_launch_environment as read_launch_environment
from clap_zero.distributed.place import report_exit_code as report_exit_code
from clap_zero.distributed.place import speaks_for_host as speaks_for_host
from clap_zero.distributed.place import was_launched as was_launched
from clap_zero.errors import LaunchError, first_line
from clap_zero.process_memory import peak_bytes


@dataclass(frozen=True)
class World:
    """This process among the processes of the job.

    Attributes:
        rank: Number of this process, 0 to size - 1.
        size: Number of processes.
        local_rank: Number of this process on its host.
        local_size: Number of processes on this host.
        device: Where this rank computes.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def has_gpu() -> bool:
    """Whether DeepSpeed computes on something other than the CPU here."""
    from deepspeed.accelerator import get_accelerator

    return get_accelerator().device_name() != "cpu"


def init_distributed(*, timeout_s: float = 1800, start_timeout_s: float = 300) -> World:
    """Join the process group, through DeepSpeed, on the accelerator that it finds. Safe to call again.

    Collective: all ranks must call.

    Args:
        timeout_s: Seconds that a collective may wait for the other ranks.
        start_timeout_s: Seconds that this may wait for all of them to come.

    Raises:
        LaunchError: The ranks did not come together, or two of them share a device or a rank number.
    """
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    # DeepSpeed calls a function that torch renamed.
    warnings.filterwarnings("ignore", message=".*all_gather_into_tensor.*", category=FutureWarning)
    env = read_launch_environment()
    _complete_environment(env)
    accelerator = get_accelerator()
    name = accelerator.device_name()
    if name == "cpu":
        # The shared-memory reduction is compiled at first use; a start that is killed meanwhile leaves a lock that
        # hangs every later start. Gloo needs no compiler.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        device = torch.device("cpu")
    else:
        if env.local_rank >= accelerator.device_count():
            raise LaunchError(
                f"rank {env.rank} on {socket.gethostname()} is local rank {env.local_rank}, but only "
                f"{accelerator.device_count()} device(s) are visible there: start fewer ranks (--num_gpus)"
            )
        accelerator.set_device(env.local_rank)
        device = torch.device(accelerator.current_device_name())
    if not deepspeed.comm.is_initialized():
        try:
            deepspeed.init_distributed(
                dist_backend=accelerator.communication_backend_name(),
                timeout=timedelta(seconds=start_timeout_s),
                init_method=rendezvous_method(),
                auto_mpi_discovery=False,
                verbose=False,
            )
        except (RuntimeError, ValueError) as error:
            where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            raise LaunchError(
                f"rank {env.rank} of {env.size} on {socket.gethostname()} could not join the others at {where}: "
                f"{first_line(error).rstrip('.')}{hub.told_absent()}"
            ) from error
        collectives.set_timeout(timeout_s)
    world = World(env.rank, env.size, env.local_rank, env.local_size, device)
    _check_everyone_is_here(world)
    return world


def teardown() -> None:
    """Leave the process group. Safe to call without one, and after a failure of another rank."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def set_cpu_threads(world: World) -> int:
    """Share the cores of the host among its ranks.

    torchrun sets OMP_NUM_THREADS to 1 by itself and DeepSpeed sets nothing, so on CPU ranks either default is wrong. A
    value that the user exported stays.

    Returns:
        Threads that this rank computes with.
    """
    chosen_by_user = "OMP_NUM_THREADS" in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ
    if world.device.type == "cpu" and not chosen_by_user:
        torch.set_num_threads(cores_per_rank(world))
    return torch.get_num_threads()


def cores_per_rank(world: World) -> int:
    """Cores of this host that one rank may use, at least 1."""
    return max(1, len(os.sched_getaffinity(0)) // world.local_size)


def memory_bytes(world: World) -> int:
    """Memory that this rank may fill: its device's, or its share of the host's (a container's limit counts)."""
    if world.device.type != "cpu":
        from deepspeed.accelerator import get_accelerator

        return int(get_accelerator().total_memory())
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # No such file outside a cgroup v2 container; "max" where there is no limit.
    with contextlib.suppress(OSError, ValueError):
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total // world.local_size


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory that this rank has held so far: allocated on the device, or resident on a CPU rank."""
    if device.type == "cpu":
        return peak_bytes()
    from deepspeed.accelerator import get_accelerator

    return int(get_accelerator().max_memory_allocated())


def supported_precisions() -> tuple[str, ...]:
    """What DeepSpeed agrees to train in here, of fp32, bf16 and fp16."""
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    halves = (("bf16", accelerator.is_bf16_supported()), ("fp16", accelerator.is_fp16_supported()))
    return ("fp32", *(name for name, supported in halves if supported))


def _complete_environment(env: LaunchEnvironment) -> None:
    """Give DeepSpeed and torch the variables that they read, where no launcher set them."""
    if env.size == 1:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", str(_free_port()))
    os.environ.setdefault("MASTER_PORT", str(DEFAULT_PORT))
    for name, value in (("RANK", env.rank), ("WORLD_SIZE", env.size), ("LOCAL_RANK", env.local_rank)):
        os.environ[name] = str(value)


def _check_everyone_is_here(world: World) -> None:
    """Exchange the places of all ranks: nobody is missing, nobody is there twice."""
    places = collectives.all_gather_objects((world.rank, socket.gethostname(), world.local_rank))
    if [rank for rank, _, _ in places] != list(range(world.size)):
        raise LaunchError(f"the ranks that came are {[p[0] for p in places]}, expected 0 to {world.size - 1}")
    if world.device.type == "cpu":
        return
    doubled = [place for place, count in Counter((h, local) for _, h, local in places).items() if count > 1]
    if doubled:
        host, local_rank = doubled[0]
        raise LaunchError(f"several ranks on {host} have local rank {local_rank}, so they would share one device")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
