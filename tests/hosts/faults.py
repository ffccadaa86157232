"""Faults of a job on several hosts: how each is made, and what has to become of the job."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.hosts.bed import Bed
from tests.hosts.jobs import (
    ENV_FILE,
    FLAGS,
    Job,
    deepspeed,
    describe,
    losses,
    rank_processes,
    start,
    wait_for,
    wait_for_step,
)

HERE = Path(__file__).resolve().parent
LIMIT_S = 60.0
"""Within so long every process on every host has to be gone."""

GIVE_UP_S = 150.0
"""So long a fault is watched before what is left of it is counted as never ending."""

FAULT_STEP = 3
IMPORTING_S = 1.0
"""So long after its start a rank is on its imports."""

LOST = frozenset({5, 247, 255})
"""pdsh gives the largest code of all hosts: 5 of ranks that lost another, 247 that DeepSpeed's launch.py makes of a
killed one, 255 of an ssh that lost its host. The scripts in launch/ give 5."""


@dataclass
class Scene:
    """A bed with the directory of a job, and the job once it runs."""

    bed: Bed
    cwd: Path
    flags: list[str]
    slots: int = 1
    env_file: str = ENV_FILE
    _job: Job | None = None

    @property
    def run_dir(self) -> Path:
        return self.bed.seen_by_hosts(self.cwd / "run")

    @property
    def job(self) -> Job:
        assert self._job is not None, "the job has not been started"
        return self._job

    def start(self) -> None:
        (self.cwd / ".deepspeed_env").write_text(self.env_file)
        hostfile = self.bed.hostfile(self.cwd / "hostfile", slots=self.slots)
        self._job = start(self.bed.hosts[0], deepspeed(hostfile, *FLAGS, *self.flags), cwd=self.cwd)

    def plant(self, host: str, function: str, *, after: int = 0) -> None:
        """Have a function raise on a host, from its call number `after` + 1 on."""
        module, _, name = function.rpartition(".")
        plan = {"host": host, "module": module, "function": name, "after": after, "message": "planted fault"}
        shutil.copy(HERE / "plant.py", self.cwd / "sitecustomize.py")
        (self.cwd / "plant.json").write_text(json.dumps(plan))


Action = Callable[[Scene], None]


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        name: What happens, as the table says it.
        inject: Does it to a job that has taken so many steps; None for faults that are there from the start.
        at_step: How many; 0: as soon as there are ranks on all hosts, which then import their libraries.
        prepare: Does it, or makes it possible, before the job starts.
        told: Regular expressions that one line of the output has to match all: the host, the rank and the cause, as
            far as the fault has them.
        codes: Exit codes that are right.
        flags: Further flags of the job.
        num_steps: Length of the job.
        slots: Ranks on each host.
        starts: Whether any rank starts at all.
        survives: The job must go on to its end instead.
        leaves: Files that have to be in the run directory at the end.
        makes: Arguments of the bed besides its folder, from the directory of the job.
    """

    name: str
    told: Mapping[str, str]
    inject: Action | None = None
    at_step: int = FAULT_STEP
    prepare: Action | None = None
    codes: frozenset[int] = LOST
    flags: tuple[str, ...] = ()
    num_steps: int = 100_000
    slots: int = 1
    starts: bool = True
    survives: bool = False
    leaves: tuple[str, ...] = ()
    makes: Callable[[Path], dict[str, object]] = field(default=lambda cwd: {})


@dataclass(frozen=True)
class Outcome:
    """What became of a job with a fault.

    Attributes:
        seconds: From the fault (from the command, where it is there from the start) to the end of the last process on
            any host.
        code: Exit code of the command, None if it never ended.
        output: All that a user saw.
        message: The line that tells, or the last line of the package where none does.
        named: Which of the things to be told that line has.
        left: What was still there at GIVE_UP_S.
        absent: Files that had to be left by the run and were not.
    """

    seconds: float
    code: int | None
    output: str
    message: str
    named: dict[str, bool]
    left: list[str]
    absent: list[str]


def play(fault: Fault, scene: Scene) -> Outcome:
    """Start the job, do the fault, wait for the end of everything."""
    scene.flags += ["--train.max_steps", str(fault.num_steps), *fault.flags]
    if fault.prepare is not None:
        fault.prepare(scene)
    began = time.monotonic()
    scene.start()
    if fault.inject is not None:
        wait_for_step(scene.run_dir, fault.at_step, scene.job) if fault.at_step else wait_for_ranks(scene)
        began = time.monotonic()
        fault.inject(scene)
    left: list[psutil.Process] = []
    # No host has a process in the moment between nsenter and the command.
    while (left := scene.bed.processes()) or scene.job.process.poll() is None:
        if time.monotonic() - began > GIVE_UP_S:
            break
        time.sleep(0.2)
    seconds = time.monotonic() - began
    shown = [describe(one) for one in left]
    for one in left:
        one.kill()
    code = scene.job.process.poll()
    scene.job.wait(timeout_s=20)
    output = scene.job.output
    message, named = best_line(output, fault.told)
    absent = [name for name in fault.leaves if not (scene.run_dir / name).exists()]
    return Outcome(seconds, code, output, message, named, shown, absent)


def wait_for_ranks(scene: Scene) -> None:
    """Wait until the ranks of all hosts import their libraries."""

    def are_there() -> bool:
        return all(len(rank_processes(host)) == scene.slots for host in scene.bed.hosts)

    wait_for(are_there, timeout_s=60, what="ranks on all hosts", job=scene.job)
    time.sleep(IMPORTING_S)


def best_line(output: str, told: Mapping[str, str]) -> tuple[str, dict[str, bool]]:
    """The package's own line that tells most of what is to be told, the last of several, and what it tells."""
    best, most = "", dict.fromkeys(told, False)
    for line in output.splitlines():
        text = re.sub(r"^node\d+: ", "", line)  # pdsh's mark of the host does not count
        if not text.startswith("clap_zero"):
            continue
        named = {what: re.search(pattern, text) is not None for what, pattern in told.items()}
        if sum(named.values()) >= max(1, sum(most.values())):
            best, most = text, named
    return best, most


def is_right(fault: Fault, outcome: Outcome) -> list[str]:
    """What is wrong with an outcome; empty where nothing is."""
    wrong = []
    if outcome.left:
        wrong.append(f"still there after {outcome.seconds:.0f} s: {outcome.left}")
    if outcome.absent:
        wrong.append(f"not in the run directory: {outcome.absent}")
    if fault.survives:
        return wrong + ([f"exit code {outcome.code}"] if outcome.code != 0 else [])
    if outcome.seconds > LIMIT_S:
        wrong.append(f"{outcome.seconds:.0f} s until all was gone")
    if outcome.code not in fault.codes:
        wrong.append(f"exit code {outcome.code}, expected {sorted(fault.codes)}")
    missing = [what for what, is_there in outcome.named.items() if not is_there]
    if missing:
        wrong.append(f"no line tells {', '.join(missing)}; the nearest: {outcome.message!r}")
    return wrong


def last_loss_step(scene: Scene) -> int:
    return max(losses(scene.run_dir), default=0)
