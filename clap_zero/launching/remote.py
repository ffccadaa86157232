"""Several machines, or another one: reach them, let them meet, and hand over variables and arguments whole."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from clap_zero.errors import ConfigError, LaunchError
from clap_zero.launching import entry, environment, leftovers, local, watch_pdsh
from clap_zero.launching.arguments import quote
from clap_zero.launching.environment import Variable
from clap_zero.launching.hostfile import HostSlots
from clap_zero.launching.hosts import (
    Devices,
    address_towards,
    check_reachable,
    is_port_free,
    is_this_machine,
    launcher_trouble,
)
from clap_zero.launching.options import LauncherOptions

TOOLS = {
    "pdsh": ("pdsh", "apt-get install pdsh"),
    "openmpi": ("ompi_info", "apt-get install openmpi-bin"),
    "mpich": ("mpirun", "apt-get install mpich"),
    "impi": ("mpirun", "Intel MPI"),
    "mvapich": ("mpiname", "MVAPICH2-GDR"),
    "slurm": ("srun", "apt-get install slurm-client, and be on a node of the cluster"),
}
"""Launcher of DeepSpeed -> the program that it needs, and how to come by it."""

UNTRIED = ("mpich", "impi", "mvapich")
"""Nobody has run these with clap_zero."""

SSH_ALIVE = "-oServerAliveInterval=3 -oServerAliveCountMax=7"
"""A host that is cut off closes no connection: without this, ssh and pdsh wait for it for ever. The 24 s that they give
add to the 30 s of `distributed.heartbeat_timeout_s` where only one direction is cut: the host's last words count."""

SCRIPT = Path(__file__).with_name("script.py")
_SHELL_SAFE = re.compile(r"[\w@%+=:,./-]+")


def prepare(command: LauncherOptions, active: Devices, *, whole: Sequence[HostSlots]) -> LauncherOptions:
    """The command for several hosts.

    Args:
        active: Hosts and devices that take part.
        whole: The hostfile: the MPI launchers always use all of it.

    Raises:
        ConfigError: An option that the launcher cannot follow.
        LaunchError: A missing tool, an unreachable host, a taken port, or a path that pdsh would break.
    """
    launcher = str(command.get("launcher", "pdsh")).lower()
    _check_launcher(command, launcher)
    local.warn_of_visible()
    here = is_this_machine(next(iter(active)))
    if here and launcher != "slurm" and not is_port_free(local.port_of(command)):
        raise LaunchError(local.port_taken(local.port_of(command)))
    command = _with_address(command, active, launcher=launcher, here=here)
    variables = environment.gather()
    if launcher == "pdsh":
        if not command.get("no_ssh_check"):
            ssh_port = command.get("ssh_port")
            check_reachable(active, ssh_port=ssh_port)
            shown = environment.pack(variables, shell=True).shown
            known = {name: value.replace("%%", "%") for name, value in shown.items()}  # doubled for pdsh alone
            ask = functools.partial(launcher_trouble, ssh_port=ssh_port, variables=known)
            watch_pdsh.watch(active, ask=ask)
        command = command.with_options(no_ssh_check=True)
        # ssh takes the first value that it is given: the user's own stays.
        os.environ["PDSH_SSH_ARGS_APPEND"] = f"{os.environ.get('PDSH_SSH_ARGS_APPEND', '')} {SSH_ALIVE}".strip()
    if launcher != "pdsh":
        # pdsh's launch.py sets these for its ranks; the others leave them to us.
        variables["MASTER_ADDR"] = Variable(str(command.get("master_addr")))
        variables["MASTER_PORT"] = Variable(str(local.port_of(command)))
    _hand_over(variables, launcher=launcher)
    return _program(command, launcher=launcher, hosts=whole)


def _check_launcher(command: LauncherOptions, launcher: str) -> None:
    if launcher not in TOOLS:
        raise ConfigError(f"--launcher {launcher}: DeepSpeed has {', '.join(TOOLS)}")
    program, way = TOOLS[launcher]
    if shutil.which(program) is None:
        raise LaunchError(f"--launcher {launcher} needs {program}, which is not installed here ({way})")
    if launcher in UNTRIED:
        local.tell(f"--launcher {launcher} has never been tried with clap_zero; pdsh, openmpi and slurm have")
    if launcher == "pdsh":
        for what, path in (("the working directory", str(Path.cwd())), ("this Python", sys.executable)):
            if _SHELL_SAFE.fullmatch(path) is None or "%" in path:
                raise LaunchError(
                    f"{what} is {path!r}, and DeepSpeed does not quote it for the other hosts: move it to a path "
                    "without spaces and special characters"
                )
    elif launcher != "slurm":
        for name in ("include", "exclude", "num_nodes", "num_gpus"):
            if command.get(name):
                raise ConfigError(
                    f"--{name} does not go with --launcher {launcher}, which starts all slots of the hostfile: write "
                    "a hostfile with what you want"
                )


def _with_address(command: LauncherOptions, active: Devices, *, launcher: str, here: bool) -> LauncherOptions:
    """The address where the ranks meet. DeepSpeed takes the first that `hostname -I` prints, whoever can reach it."""
    if command.get("master_addr"):
        return command
    first, *others = active
    if launcher == "slurm":
        return command.with_options(master_addr=_first_of_allocation() or first, no_ssh_check=True)
    address = address_towards(others[0]) if here and others else None
    if address is None and launcher != "pdsh":
        address = "127.0.0.1" if here and not others else first.rpartition("@")[2]
    if address is None:
        return command  # pdsh: DeepSpeed asks the first host
    command = command.with_options(master_addr=address)
    return command if launcher == "pdsh" else command.with_options(no_ssh_check=True)


def _first_of_allocation() -> str | None:
    """The node where Slurm starts rank 0, None outside an allocation."""
    nodes = os.environ.get("SLURM_JOB_NODELIST")
    if not nodes or shutil.which("scontrol") is None:
        return None
    shown = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=False)
    return next(iter(shown.stdout.split()), None)


def _hand_over(variables: dict[str, Variable], *, launcher: str) -> None:
    """Leave the variables where DeepSpeed and the ranks find them."""
    baggage = environment.pack(variables, shell=launcher == "pdsh")
    environment.hide(list(baggage.private))
    shown = dict(baggage.shown)
    if baggage.private:
        path = environment.write_private(baggage.private, Path.cwd() / "runs")
        leftovers.remove_on_signals()
        shown[environment.PRIVATE_FILE] = str(path)
        shown[environment.PRIVATE_NAMES] = ",".join(baggage.private)
    if launcher == "slurm":
        os.environ.update(shown)  # srun takes the whole environment along
        shown = {}
    file = local.private_folder() / "variables"
    environment.write_owner_only(file, "".join(f"{name}={value}\n" for name, value in shown.items()))
    # DeepSpeed looks for this name in two folders; an absolute one is the same in both.
    os.environ["DS_ENV_FILE"] = str(file)


def _program(command: LauncherOptions, *, launcher: str, hosts: Sequence[HostSlots]) -> LauncherOptions:
    """What the launcher starts: the module, or a script where DeepSpeed drops --module."""
    if launcher == "pdsh":
        words = tuple(quote(command.arguments))
        if words != command.arguments and command.program not in entry.READERS:
            raise ConfigError(
                f"-m {command.program} on several hosts takes no argument with spaces or special characters: "
                f"{entry.READERS[0]} alone reads them back"
            )
        return LauncherOptions(command.given, command.program, words)
    if launcher == "openmpi":
        extra = command.get("launcher_args", "")
        if "bind-to" not in extra:
            # Bound to a core by mpirun, a rank and its loader workers would share that one.
            command = command.with_options(launcher_args=f"{extra} --bind-to none".strip())
        return command
    if launcher not in ("slurm", "mpich"):
        return command
    if command.program != "clap_zero.train":
        raise ConfigError(f"--launcher {launcher} of DeepSpeed starts scripts only: {command.program} is a module")
    return LauncherOptions(command.with_options(module=None).given, str(SCRIPT), command.arguments)
