"""Real training jobs for the integration tests: the launchers as a user types them, and what a run left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from clap_zero.training.run_directory import read_jsonl
from tests.processes import command_of

BIN = Path(sys.executable).parent
MODULE = "clap_zero.train"
ROOT = Path(__file__).resolve().parents[2]
LAUNCHERS = {
    "deepspeed -m": ["deepspeed", "--num_gpus", "2", "-m", MODULE],
    "deepspeed --module": ["deepspeed", "--num_gpus", "2", "--module", MODULE],
    "torchrun": ["torchrun", "--nproc_per_node", "2", "-m", MODULE],
    "accelerate": ["accelerate", "launch", "--multi_gpu", "--num_processes", "2", "-m", MODULE],
    "alone": ["python", "-m", MODULE],
}
# Small and exact: fp32, no dropout that hides a difference, a step in a fraction of a second.
FAST = (
    *("--ds_config", str(ROOT / "ds_configs" / "zero2.json"), "--ds.bf16", "null"),
    *("--train.micro_batch_size", "4", "--train.warmup_steps", "2", "--train.learning_rate", "1e-3"),
)


def command(launcher: str, *flags: str, port: int | None = None) -> list[str]:
    """The command line of a job; `port` for launchers that would otherwise meet another job of the test run."""
    words = list(LAUNCHERS[launcher])
    if port is not None and words[0] != "python":
        words[1:1] = ["--master_port", str(port)] if words[0] != "accelerate" else []
    if words[0] == "accelerate":
        words[2:2] = ["--main_process_port", str(port)] if port is not None else []
    return [str(BIN / words[0]), *words[1:], *flags]


def start(words: Sequence[str], *, cwd: Path, **variables: str) -> subprocess.Popen[str]:
    """Start a job in its own session, output into one pipe."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", **variables}
    return subprocess.Popen(
        words,
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def run(words: Sequence[str], *, cwd: Path, timeout_s: float = 240, **variables: str) -> tuple[int, str]:
    """Run a job to its end.

    Returns:
        Exit code, output.
    """
    with job(words, cwd=cwd, **variables) as process:
        output, _ = process.communicate(timeout=timeout_s)
        return process.returncode, output


@contextmanager
def job(words: Sequence[str], *, cwd: Path, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """A job that does not outlive the test, whatever happens in it."""
    process = start(words, cwd=cwd, **variables)
    try:
        yield process
    finally:
        for one in session_processes(process.pid):
            with suppress(psutil.NoSuchProcess):
                one.kill()
        if process.stdout is not None and not process.stdout.closed:  # a failed wait has read it
            process.communicate()
        process.wait()


def session_processes(session: int) -> list[psutil.Process]:
    """All living processes of a session, orphans included, and those that torchrun put into sessions of their own."""
    try:
        below = psutil.Process(session).children(recursive=True)
    except psutil.NoSuchProcess:
        below = []
    inside, outside = [], []
    for one in {*below, *psutil.process_iter()}:
        # Any of them may end between two of these lines.
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(one.pid) != session:
                outside.extend([one] if one in below else [])
            elif one.status() != psutil.STATUS_ZOMBIE:
                inside.append(one)
    return outside + inside


def ranks(session: int) -> dict[int, psutil.Process]:
    """The training processes of a job by rank."""
    found = {}
    for one in session_processes(session):
        try:
            words, environment = one.cmdline(), one.environ()
        except psutil.NoSuchProcess:
            continue
        if MODULE in words and "-c" not in words and "RANK" in environment and "launch" not in " ".join(words):
            found[int(environment["RANK"])] = one
    return found


def launch_py(session: int) -> psutil.Process:
    """DeepSpeed's launch.py of a job."""
    return next(one for one in session_processes(session) if "deepspeed.launcher.launch" in command_of(one))


def wait_for_step(run_dir: Path, step: int, process: subprocess.Popen[str], *, timeout_s: float = 120) -> None:
    """Wait until metrics.jsonl has a step, as long as the job lives."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if any(line.get("step", 0) >= step for line in read_jsonl(run_dir / "metrics.jsonl") if "loss" in line):
            return
        assert process.poll() is None, f"the job ended before step {step}:\n{process.communicate()[0]}"
        time.sleep(0.02)
    raise AssertionError(f"no step {step} in {timeout_s} s")


def wait_until_gone(session: int, *, timeout_s: float) -> float:
    """Wait for the last process of a session.

    Returns:
        Seconds that it took.
    """
    started = time.monotonic()
    while session_processes(session):
        assert time.monotonic() - started < timeout_s, f"alive: {[p.cmdline() for p in session_processes(session)]}"
        time.sleep(0.1)
    return time.monotonic() - started


def steps(run_dir: Path) -> dict[int, dict[str, Any]]:
    """The lines of metrics.jsonl by step; the last line of a step wins."""
    return {line["step"]: line for line in read_jsonl(run_dir / "metrics.jsonl") if "loss" in line}


def keys(folder: Path) -> dict[int, dict[int, list[str]]]:
    """rank -> step -> sample keys, from --data.log_keys; the last line of a step wins."""
    return {
        int(path.stem.removeprefix("rank")): {line["step"]: line["keys"] for line in read_jsonl(path)}
        for path in sorted(folder.glob("rank*.jsonl"))
    }


def evaluation(run_dir: Path, step: int) -> dict[str, float]:
    return json.loads((run_dir / "eval" / f"step-{step}.json").read_text())


def kill(process: psutil.Process) -> None:
    process.send_signal(signal.SIGKILL)
