"""Training across the hosts of a bed: the launchers as a user types them on the first host, and their end."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from clap_zero.data.embedded import sounds_directory
from clap_zero.data.pack import PackOptions, pack
from clap_zero.data.pack_sources import Columns
from clap_zero.training.run_directory import read_jsonl
from tests.hosts.bed import Bed, Host

BIN = Path(sys.executable).parent
ROOT = Path(__file__).resolve().parents[2]
MODULE = "clap_zero.train"
NUM_PAIRS = 40
ENV_FILE = "OMP_NUM_THREADS=1\nTOKENIZERS_PARALLELISM=false\nHF_HUB_OFFLINE=1\n"
"""What the ranks are to have on each host: the user's .deepspeed_env."""
FLAGS = (
    *("--ds_config", str(ROOT / "ds_configs" / "zero2.json"), "--ds.bf16", "null"),
    *("--train.micro_batch_size", "2", "--train.global_batch_size", "8", "--train.learning_rate", "1e-3"),
    *("--train.warmup_steps", "2", "--train.schedule", "constant"),
    *("--wandb.mode", "disabled", "--data.workers", "1", "--run_dir", "run"),
)
"""Small and exact: fp32, a step in a fraction of a second."""


def environment(home: Path) -> dict[str, str]:
    """What a login shell on a host has: nothing of the test run's own settings."""
    path = f"{BIN}{os.pathsep}/usr/sbin:/usr/bin:/sbin:/bin"
    return {"PATH": path, "HOME": str(home), "LANG": "C.UTF-8", **dict(line.split("=") for line in ENV_FILE.split())}


def data_flags(folder: Path) -> list[str]:
    """Flags for training on some of the embedded sounds, as shards below `folder`."""
    sounds = sounds_directory()
    with (sounds / "manifest.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["split"] == "train"][: 9 * NUM_PAIRS : 9]
    with (folder / "manifest.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows({**row, "file": str(sounds / row["file"])} for row in rows)
    columns = Columns(audio="file", split="split")
    pack(PackOptions(folder / "out", manifest=folder / "manifest.csv", columns=columns, workers=1, progress=False))
    return ["--data.train", str(folder / "out" / "train")]


def deepspeed(hostfile: Path | None, *flags: str, options: Sequence[str] = ()) -> list[str]:
    """The `deepspeed` command: over the hosts of a file, or two ranks on this one."""
    where = ["--num_gpus", "2"] if hostfile is None else ["--hostfile", str(hostfile)]
    return [str(BIN / "deepspeed"), *where, *options, "-m", MODULE, *flags]


@dataclass
class Job:
    """A command on a host, with all its output read as it comes."""

    process: subprocess.Popen[str]
    started: float = field(default_factory=time.monotonic)
    lines: list[tuple[float, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as stream:
            for line in stream:
                self.lines.append((time.monotonic(), line.rstrip("\n")))

    @property
    def output(self) -> str:
        return "\n".join(line for _, line in self.lines)

    def wait(self, *, timeout_s: float) -> int:
        """Wait for the end of the command and of its output.

        Returns:
            The exit code; negative is a signal.
        """
        code = self.process.wait(timeout=timeout_s)
        self._reader.join(timeout=10)
        return code


def start(host: Host, words: Sequence[str], *, cwd: Path, **variables: str) -> Job:
    """Start a command on a host, in a session of its own."""
    return Job(
        subprocess.Popen(
            host.enter(words, cwd=cwd),
            env=environment(cwd) | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    )


def run(host: Host, words: Sequence[str], *, cwd: Path, timeout_s: float = 240, **variables: str) -> tuple[int, str]:
    """Run a command on a host to its end.

    Returns:
        Exit code, output.
    """
    job = start(host, words, cwd=cwd, **variables)
    code = job.wait(timeout_s=timeout_s)
    return code, job.output


def rank_processes(host: Host) -> list[psutil.Process]:
    """The ranks on a host, without their loader workers and without the launcher's processes."""
    found = []
    for one in host.processes():
        try:
            words, variables = one.cmdline(), one.environ()
        except psutil.NoSuchProcess:
            continue
        if "-m" in words and MODULE in words and "RANK" in variables and "launch" not in " ".join(words[:6]):
            found.append(one)
    return found


def find(host: Host, *words: str) -> psutil.Process:
    """The process on a host whose command line has all these words in it; the oldest where there are several."""
    found = []
    for one in host.processes():
        try:
            line, created = " ".join(one.cmdline()), one.create_time()
        except psutil.NoSuchProcess:
            continue
        if all(word in line for word in words):
            found.append((created, one))
    assert found, f"no process with {words} on {host.name}"
    return min(found, key=lambda pair: pair[0])[1]


def wait_for(condition: Callable[[], bool], *, timeout_s: float, what: str, job: Job | None = None) -> float:
    """Wait until something is true, as long as the job lives.

    Returns:
        Seconds that it took.
    """
    started = time.monotonic()
    while not condition():
        if time.monotonic() - started > timeout_s:
            raise AssertionError(f"not in {timeout_s} s: {what}" + (f"\n{job.output}" if job is not None else ""))
        if job is not None and job.process.poll() is not None and not condition():
            raise AssertionError(f"the job ended with {job.process.returncode} before: {what}\n{job.output}")
        time.sleep(0.1)
    return time.monotonic() - started


def wait_for_step(run_dir: Path, step: int, job: Job, *, timeout_s: float = 150) -> None:
    """Wait until metrics.jsonl has a step."""
    wait_for(lambda: max(losses(run_dir), default=0) >= step, timeout_s=timeout_s, what=f"step {step}", job=job)


def losses(run_dir: Path) -> dict[int, float]:
    """step -> loss; the last line of a step wins."""
    if not (run_dir / "metrics.jsonl").exists():
        return {}
    return {line["step"]: line["loss"] for line in read_jsonl(run_dir / "metrics.jsonl") if "loss" in line}


def wait_until_gone(bed: Bed, *, timeout_s: float) -> float:
    """Wait for the last process on any host, sshd left out.

    Returns:
        Seconds that it took.
    """
    started = time.monotonic()
    while left := bed.processes():
        if time.monotonic() - started > timeout_s:
            raise AssertionError(f"still there after {timeout_s:.0f} s:\n" + "\n".join(map(describe, left)))
        time.sleep(0.2)
    return time.monotonic() - started


def describe(process: psutil.Process) -> str:
    try:
        environment = process.environ()
        where = f" (rank {environment['RANK']})" if "RANK" in environment else ""
        return f"{process.status()}{where}: {' '.join(process.cmdline())[:160]}"
    except psutil.NoSuchProcess:
        return "ended meanwhile"


def kill(process: psutil.Process) -> None:
    process.send_signal(signal.SIGKILL)
