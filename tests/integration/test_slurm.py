"""launch/slurm.sbatch and `deepspeed --launcher slurm` under a real Slurm with two nodes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.jobs import BIN, FAST, MODULE, run
from tests.integration.slurm_cluster import cluster, missing, told, wait_for

pytestmark = [
    pytest.mark.integration,
    pytest.mark.long,
    pytest.mark.skipif(bool(missing()), reason=f"no Slurm here: {missing()}"),
]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with cluster(tmp_path_factory.mktemp("slurm")) as variables:
        yield variables


@pytest.fixture
def checkout(tmp_path: Path, root: Path) -> Path:
    """A checkout whose environment is this one, so that the scripts find nothing to install."""
    folder = tmp_path / "checkout"
    (folder / ".venv").mkdir(parents=True)
    for name in ("launch", "packaging"):
        shutil.copytree(root / name, folder / name)
    for name in ("pyproject.toml", "hatch_build.py"):
        shutil.copy(root / name, folder / name)
    for name in ("clap_zero", "ds_configs", "examples"):
        (folder / name).symlink_to(root / name)
    for path in Path(sys.prefix).iterdir():
        if path.name != ".clap_zero_installed":
            (folder / ".venv" / path.name).symlink_to(path)
    script = '. launch/_env.sh; wanted "$PY" >"$STAMP"'
    subprocess.run(["bash", "-c", script], cwd=folder, check=True)
    return folder


def state_of(slurm: dict[str, str], job: str) -> str:
    match = re.search(r"JobState=(\w+)", told(slurm, "scontrol", "show", "job", job))
    return match[1] if match else "?"


def submit(slurm: dict[str, str], checkout: Path, log: Path, *flags: str) -> str:
    """Submit launch/slurm.sbatch for two nodes of one rank each.

    Returns:
        The number of the job.
    """
    options = ["--parsable", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1", "--gpus-per-node=0", "--time=9"]
    words = ["sbatch", *options, f"--output={log}", "launch/slurm.sbatch", *FAST[2:], *flags]
    # The nodes are this machine under two names that no name server knows.
    environment = os.environ | slurm | {"MASTER_ADDR": "127.0.0.1"}
    done = subprocess.run(words, cwd=checkout, capture_output=True, text=True, check=True, env=environment)
    return done.stdout.strip()


def test_a_job_trains_on_two_nodes_and_keeps_its_exit_code(
    slurm: dict[str, str], checkout: Path, shards: tuple[Path, Path], tmp_path: Path
) -> None:
    log, run_dir = tmp_path / "job.log", tmp_path / "it's a run"
    flags = ["--data.train", str(shards[0]), "--train.max_steps", "2", "--run_dir", str(run_dir)]
    job = submit(slurm, checkout, log, *flags)
    wait_for(lambda: state_of(slurm, job) in ("COMPLETED", "FAILED"), timeout_s=150)
    assert state_of(slurm, job) == "COMPLETED", log.read_text()
    assert (run_dir / "checkpoints" / "step-00000002").is_dir()

    wrong = submit(slurm, checkout, log, "--train.max_step", "2")
    wait_for(lambda: state_of(slurm, wrong) in ("COMPLETED", "FAILED"), timeout_s=60)
    assert "ExitCode=2:0" in told(slurm, "scontrol", "show", "job", wrong), log.read_text()
    assert not list((checkout / "runs").glob(".exit-codes*"))


def test_a_job_that_is_told_to_stop_goes_back_into_the_queue(
    slurm: dict[str, str], checkout: Path, shards: tuple[Path, Path], tmp_path: Path
) -> None:
    """As Slurm does with --signal=TERM@300 before the time limit: SIGTERM to the tasks."""
    log, run_dir = tmp_path / "job.log", tmp_path / "run"
    flags = ["--data.train", str(shards[0]), "--train.max_steps", "100000", "--run_dir", str(run_dir)]
    job = submit(slurm, checkout, log, *flags)
    wait_for(lambda: log.exists() and "step 3/" in log.read_text(), timeout_s=120)
    subprocess.run(["scancel", "--signal=TERM", job], check=True, env=os.environ | slurm)
    wait_for(lambda: "Restarts=1" in told(slurm, "scontrol", "show", "job", job), timeout_s=60)
    assert (run_dir / "checkpoints" / "latest").is_file(), log.read_text()

    # Cancelled, it writes a checkpoint and ends with 75 once more, and stays cancelled.
    wait_for(lambda: re.search("stopping after step.*step [0-9]+/", log.read_text(), re.DOTALL), timeout_s=150)
    subprocess.run(["scancel", job], check=True, env=os.environ | slurm)
    wait_for(lambda: state_of(slurm, job) == "CANCELLED", timeout_s=60)
    time.sleep(5)
    shown = told(slurm, "scontrol", "show", "job", job)
    assert "JobState=CANCELLED" in shown, log.read_text()
    assert "Restarts=1 " in shown, shown
    assert log.read_text().count("stopping after step") == 2, "it had the time for a checkpoint"


def test_deepspeeds_own_slurm_launcher_starts_the_module(
    slurm: dict[str, str], shards: tuple[Path, Path], tmp_path: Path
) -> None:
    """DeepSpeed drops --module there: without the guard, python looks for a file named clap_zero.train."""
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    words = [str(BIN / "deepspeed"), "--launcher", "slurm", "--hostfile", "hosts", "--force_multi", "-m", MODULE]
    flags = [*FAST, "--data.train", str(shards[0]), "--train.max_steps", "2", "--run_dir", "it's a run"]
    code, output = run([*words, *flags], cwd=tmp_path, **slurm)
    assert code == 0, output
    assert (tmp_path / "it's a run" / "checkpoints" / "step-00000002").is_dir()
