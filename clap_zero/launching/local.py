"""One machine: its devices, its port, and hostfiles that only DeepSpeed's parser dislikes."""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from clap_zero.errors import ConfigError, LaunchError
from clap_zero.launching import leftovers
from clap_zero.launching.devices import gpu_uuids
from clap_zero.launching.hostfile import HostSlots, written
from clap_zero.launching.hosts import free_port, port_trouble, select
from clap_zero.launching.options import LauncherOptions

DEFAULT_PORT = 29500
VISIBLE = "CUDA_VISIBLE_DEVICES"
RANKS_A_CORE, FEW_RANKS = 4, 64
"""On CPUs more ranks than cores are slow, and useful in a trial; so many more than these are a slip of the hand."""
_NO_DEVICE = ("-1", "NoDevFiles")
_OTHER_HARDWARE = ("kfd", "accel*", "davinci*", "hl[0-9]*")
"""Device files of AMD, Google, Huawei and Habana."""
_INTEL = "dri/renderD*"
"""There wherever a screen could be: only a torch for Intel's GPUs computes on them."""


def prepare(command: LauncherOptions) -> LauncherOptions:
    """The command for this machine alone, without a hostfile.

    Raises:
        ConfigError: More devices are asked for than there are, or in two ways.
    """
    uuids = gpus()
    if uuids is None:
        return _on_cpu(_with_port(command))
    visible = _visible(uuids)
    given = next((name for name in ("include", "exclude") if command.get(name)), None)
    if visible is not None and given is not None:
        raise ConfigError(
            f"{VISIBLE}={os.environ[VISIBLE]} and --{given} both choose devices, and DeepSpeed would drop the first: "
            "keep one"
        )
    wanted = command.get("num_gpus")
    available = len(uuids) if visible is None else len(visible)
    if wanted is not None and wanted > available:
        through = "" if visible is None else f" in {VISIBLE}={os.environ[VISIBLE]}"
        raise ConfigError(f"--num_gpus {wanted}: this machine has {available} GPU(s){through}")
    if given is not None:
        select(
            {"localhost": len(uuids)},
            include=command.get("include", ""),
            exclude=command.get("exclude", ""),
            source="this machine",
        )
    if visible:
        # DeepSpeed honours the variable only where nothing else is said, and reads no UUIDs.
        os.environ[VISIBLE] = ",".join(str(index) for index in visible[:wanted])
        command = command.with_options(num_gpus=None)
    return _with_port(command)


def prepare_listed(command: LauncherOptions, slots: int, *, source: str) -> LauncherOptions:
    """The command for this machine alone, which a hostfile lists: no ssh is needed.

    Args:
        slots: Ranks that it shall run.
        source: Line of the hostfile, for messages.

    Raises:
        ConfigError: It has fewer GPUs than slots.
    """
    uuids = gpus()
    if uuids is not None and slots > len(uuids):
        raise ConfigError(f"{source}: {slots} slots, but this machine has {len(uuids)} GPU(s)")
    warn_of_visible()
    command = command.with_options(no_ssh_check=True, master_addr=command.get("master_addr") or "127.0.0.1")
    return _with_port(command)


def gpus() -> list[str] | None:
    """UUIDs of this machine's NVIDIA GPUs; None where DeepSpeed will compute on something else."""
    if os.environ.get("DS_ACCELERATOR", "cuda") != "cuda":
        return None
    uuids = gpu_uuids()
    if uuids and os.environ.get(VISIBLE) in ("", *_NO_DEVICE):
        # The usual way to say "on the CPU", but DeepSpeed's launcher sets the variable anew for each rank.
        os.environ["DS_ACCELERATOR"] = "cpu"
        return None
    return uuids or None


def warn_of_visible() -> None:
    """With a hostfile DeepSpeed sets the variable by the slots, whatever it was."""
    if os.environ.get(VISIBLE):
        tell(f"{VISIBLE} has no effect with a hostfile: choose devices with --include HOST:0,2 instead")


def with_clean_hostfile(command: LauncherOptions, hosts: Sequence[HostSlots], *, default: str) -> LauncherOptions:
    """The command with a copy of its hostfile, where the file holds more than plain lines."""
    text = written(hosts)
    if Path(command.get("hostfile", default)).read_bytes() == text.encode():
        return command
    clean = private_folder() / "hostfile"
    clean.write_text(text)
    return command.with_options(hostfile=str(clean))


def private_folder() -> Path:
    """A new folder that only this user sees, removed when this process ends, or by a later one if it was killed.

    Raises:
        LaunchError: The temporary folder cannot be written.
    """
    prefix = f"clap-zero-launch-{socket.gethostname()}-"
    try:
        folder = Path(tempfile.gettempdir())
        leftovers.remove_abandoned(folder.glob(f"{prefix}*"))
        return leftovers.keep(lambda: Path(tempfile.mkdtemp(prefix=prefix, dir=folder)))
    except OSError as error:
        raise LaunchError(f"the temporary folder cannot be written: {error.strerror}; set TMPDIR to another") from error


def port_of(command: LauncherOptions) -> int:
    """The port where the ranks will meet."""
    return int(command.get("master_port", DEFAULT_PORT))


def port_taken(port: int) -> str:
    """What to say where several hosts have to agree on a port, and it is not free on the first."""
    trouble = port_trouble(port) or "is in use"
    return (
        f"port {port} {trouble} on this machine, where the ranks would meet: give another one with --master_port, "
        "before -m"
    )


def tell(text: str) -> None:
    """One line for the user, from the launcher."""
    print(f"clap_zero: {text}", file=sys.stderr, flush=True)


def _with_port(command: LauncherOptions) -> LauncherOptions:
    """A port of its own for a job of one machine, so that two jobs started at once never meet."""
    given = command.get("master_port")
    trouble = None if given is None else port_trouble(given)
    if given is not None and trouble is None:
        return command
    port = free_port()
    if given is not None:
        tell(f"port {given} {trouble} on this machine, so the ranks meet at port {port}")
    return command.with_options(master_port=port)


def _on_cpu(command: LauncherOptions) -> LauncherOptions:
    """No NVIDIA GPU to choose: on the CPU DeepSpeed takes the variable for numbers of its own and fails."""
    if os.environ.get("DS_ACCELERATOR", "cpu") not in ("cpu", "cuda") or _other_accelerator():
        return command
    cores = os.cpu_count() or 1
    most = max(FEW_RANKS, RANKS_A_CORE * cores)
    if command.get("num_gpus", 1) > most:
        raise ConfigError(
            f"--num_gpus {command.get('num_gpus')}: this machine has no GPU and {cores} cores, on which at most {most} "
            "ranks are started"
        )
    if os.environ.pop(VISIBLE, ""):
        tell(f"{VISIBLE} has no effect: the ranks compute on the CPU; --num_gpus N starts N of them")
    for name in ("include", "exclude"):
        if command.get(name):
            raise ConfigError(
                f"--{name} {command.get(name)} chooses GPUs, and there is none here: --num_gpus N starts N ranks on "
                "the CPU"
            )
    return command


def _other_accelerator() -> bool:
    """Whether there is hardware of another make, whose devices DeepSpeed knows and this module does not."""
    torch = importlib.util.find_spec("torch")
    origin = torch.origin if torch is not None else None
    for_intel = origin is not None and Path(origin).with_name("lib").joinpath("libtorch_xpu.so").exists()
    patterns = (*_OTHER_HARDWARE, _INTEL) if for_intel else _OTHER_HARDWARE
    return any(next(Path("/dev").glob(pattern), None) is not None for pattern in patterns)


def _visible(uuids: Sequence[str]) -> list[int] | None:
    """Indices that CUDA_VISIBLE_DEVICES chooses, None where it is not set.

    Raises:
        ConfigError: An entry that names no GPU of this machine.
    """
    text = os.environ.get(VISIBLE)
    if not text:
        return None
    return [_index(entry.strip(), uuids, text=text) for entry in text.split(",") if entry.strip()]


def _index(entry: str, uuids: Sequence[str], *, text: str) -> int:
    if entry.isdecimal() and int(entry) < len(uuids):
        return int(entry)
    if entry.startswith("MIG-"):
        raise ConfigError(
            f"{VISIBLE}={text}: DeepSpeed's launcher knows devices by number only, and a slice of a GPU has none: "
            "start with `torchrun --nproc_per_node 1 -m clap_zero.train`"
        )
    found = [index for index, uuid in enumerate(uuids) if entry and uuid.startswith(entry)]
    if len(found) != 1:
        raise ConfigError(f"{VISIBLE}={text}: this machine has no GPU {entry!r}; it has 0 to {len(uuids) - 1}")
    return found[0]
