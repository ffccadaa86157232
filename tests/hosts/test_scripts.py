"""launch/multi_node.sh over two hosts: its exit code is the truth, and one signal gives a checkpoint."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosts.bed import Bed
from tests.hosts.jobs import (
    ENV_FILE,
    FLAGS,
    ROOT,
    Job,
    find,
    kill,
    rank_processes,
    start,
    wait_for_step,
    wait_until_gone,
)

pytestmark = [pytest.mark.integration, pytest.mark.long]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The scripts with an environment that they take for their own: that of the tests."""
    folder = tmp_path / "checkout"
    for name in ("launch", "packaging", "ds_configs"):
        shutil.copytree(ROOT / name, folder / name)
    for name in ("pyproject.toml", "hatch_build.py"):
        shutil.copy(ROOT / name, folder / name)
    venv = folder / ".venv"
    venv.mkdir()
    for name in ("bin", "lib", "pyvenv.cfg"):
        (venv / name).symlink_to(Path(sys.prefix) / name)
    stamp = f'. "{folder}/launch/_env.sh"; wanted "$PY" >"$STAMP"'
    subprocess.run(["bash", "-c", stamp], check=True)
    (folder / ".deepspeed_env").write_text(ENV_FILE)
    return folder


def launch(bed: Bed, checkout: Path, data: list[str]) -> Job:
    hostfile = bed.hostfile(checkout / "hostfile")
    words = ["bash", "launch/multi_node.sh", str(hostfile), *FLAGS[2:], *data, "--train.max_steps", "100000"]
    return start(bed.hosts[0], words, cwd=checkout)


def test_a_killed_rank_gives_5(bed: Bed, checkout: Path, data: list[str]) -> None:
    job = launch(bed, checkout, data)
    wait_for_step(checkout / "run", 2, job)
    kill(rank_processes(bed.hosts[1])[0])
    wait_until_gone(bed, timeout_s=60)
    assert job.wait(timeout_s=10) == 5, job.output
    assert any("rank 1 on node2 died" in line for line in job.output.splitlines()), job.output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_gives_a_checkpoint_and_75(bed: Bed, checkout: Path, data: list[str], number: signal.Signals) -> None:
    job = launch(bed, checkout, data)
    wait_for_step(checkout / "run", 2, job)
    find(bed.hosts[0], "bash", "launch/multi_node.sh").send_signal(number)
    wait_until_gone(bed, timeout_s=60)
    assert job.wait(timeout_s=10) == 75, job.output
    assert (checkout / "run" / "checkpoints" / "latest").exists(), job.output
    assert [path.name for path in (checkout / "runs").iterdir()] == []
