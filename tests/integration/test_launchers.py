"""The launchers that reach other hosts, really run: pdsh with a shell for ssh, mpirun, torchrun's rendezvous."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.integration.jobs import BIN, FAST, MODULE, run

pytestmark = pytest.mark.integration

SSH = """#!/bin/bash
# Another host for pdsh: a shell with an environment of its own, in the home directory.
while [ $# -gt 0 ]; do
    case "$1" in -o | -p | -l) shift 2 ;; -*) shift ;; *) break ;; esac
done
shift
cd && exec env -i HOME="$HOME" PATH=/usr/bin:/bin sh -c "$*"
"""
ARGUMENTS = [
    "--run-name=it's a 72\" test",
    "--template",
    "This is a sound of {}.",
    "",
    "$HOME %h `id` \\ *",
    "ä\n=",
    "a=b",
]
NAMES = ["WANDB_MODE", "HF_HOME", "NCCL_DEBUG", "X", "FROM_HOME", "FROM_WORK", "WANDB_API_KEY", "MY_TOKEN"]
VARIABLES = {
    "WANDB_MODE": "offline", "HF_HOME": "/a b/%h$Y`id`\\", "NCCL_DEBUG": "WARN", "X": "a b\"c",
    "CLAP_ZERO_FORWARD": "X", "WANDB_API_KEY": "s3cret-key",
}  # fmt: skip
SHOWN = "clap_zero.testing.shown"


def shown(output: str) -> list[dict]:
    """What each rank was given, by rank."""
    lines = [line.partition("shown ")[2] for line in output.splitlines() if "shown {" in line]
    return sorted((json.loads(line) for line in lines), key=lambda given: given["variables"]["RANK"] or "")


@pytest.mark.skipif(shutil.which("pdsh") is None, reason="pdsh is not installed (apt-get install pdsh)")
def test_l07_l09_two_hosts_see_what_one_host_sees(tmp_path: Path) -> None:
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(SSH)
    ssh.chmod(ssh.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "hosts").write_text("# two\nw1 slots=1\r\n\nw2 slots=1 # the other\n")
    (tmp_path / ".deepspeed_env").write_text("# mine\n\nFROM_HOME=a 'b'\nFROM_WORK=weak\nMY_TOKEN=s3cret-token\n")
    work = tmp_path / "work"
    work.mkdir()
    (work / ".deepspeed_env").write_text("FROM_WORK=in $HOME\n")
    tail = ["-m", SHOWN, *NAMES, "--", *ARGUMENTS]
    two = [str(BIN / "deepspeed"), "--hostfile", str(tmp_path / "hosts"), "--master_addr", "127.0.0.1", *tail]
    path = f"{ssh.parent}:{BIN}:/usr/bin:/bin"
    code, output = run(two, cwd=work, **VARIABLES, HOME=str(tmp_path), PATH=path)
    assert code == 0, output
    assert "s3cret" not in "".join(line for line in output.splitlines() if "shown {" not in line), "in the log"
    ranks = shown(output)
    assert [given["arguments"] for given in ranks] == [ARGUMENTS] * 2
    expected = {name: value for name, value in VARIABLES.items() if name in NAMES} | {
        "FROM_HOME": "a 'b'", "FROM_WORK": f"in {tmp_path}", "MY_TOKEN": "s3cret-token",
    }  # fmt: skip
    for given in ranks:
        assert {name: given["variables"][name] for name in expected} == expected
    assert not list(work.glob("runs/.variables*")), "the private file is gone"

    code, output = run([str(BIN / "deepspeed"), "--num_gpus", "1", *tail], cwd=work, **VARIABLES)
    assert code == 0, output
    assert [given["arguments"] for given in shown(output)] == [ARGUMENTS]


MPI = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@pytest.mark.long
@pytest.mark.skipif(shutil.which("ompi_info") is None, reason="Open MPI is not installed (apt-get install openmpi-bin)")
def test_l09_mpirun_carries_arguments_and_variables(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    words = [str(BIN / "deepspeed"), "--launcher", "openmpi", "--hostfile", "hosts", "--force_multi", "-m", SHOWN]
    code, output = run([*words, *NAMES, "--", *ARGUMENTS], cwd=tmp_path, **VARIABLES, **MPI)
    assert code == 0, output
    assert "s3cret" not in "".join(line for line in output.splitlines() if "shown {" not in line), "in the log"
    ranks = shown(output)
    assert [given["arguments"] for given in ranks] == [ARGUMENTS] * 2
    for given in ranks:
        assert {name: given["variables"][name] for name in ("X", "HF_HOME", "WANDB_API_KEY")} == {
            name: VARIABLES[name] for name in ("X", "HF_HOME", "WANDB_API_KEY")
        }


@pytest.mark.long
@pytest.mark.skipif(shutil.which("ompi_info") is None, reason="Open MPI is not installed (apt-get install openmpi-bin)")
def test_training_through_mpirun(tmp_path: Path, shards: tuple[Path, Path]) -> None:
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    words = [str(BIN / "deepspeed"), "--launcher", "openmpi", "--hostfile", "hosts", "--force_multi", "-m", MODULE]
    flags = [*FAST, "--data.train", str(shards[0]), "--train.max_steps", "2", "--run_dir", "run"]
    code, output = run([*words, *flags], cwd=tmp_path, **MPI)
    assert code == 0, output
    assert "2 ranks on this host" in output
    assert (tmp_path / "run" / "checkpoints" / "step-00000002").is_dir()


@pytest.mark.long
def test_l10_two_jobs_at_once_on_one_machine(tmp_path: Path) -> None:
    words = [str(BIN / "deepspeed"), "--num_gpus", "1", "-m", SHOWN, "--"]
    jobs = [subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    ports = {shown(job.communicate(timeout=120)[0])[0]["variables"]["MASTER_PORT"] for job in jobs}
    assert [job.returncode for job in jobs] == [0, 0]
    assert len(ports) == 2


@pytest.mark.long
def test_torchrun_elastic_restarts_and_the_run_goes_on(tmp_path: Path, shards: tuple[Path, Path]) -> None:
    """The rendezvous of --nnodes 1:2 with one node there; a rank is killed after the first checkpoint."""
    flags = [*FAST, "--data.train", str(shards[0]), "--train.max_steps", "12", "--checkpoint.every_steps", "2"]
    killer = tmp_path / "killer.py"
    killer.write_text(
        "import os, pathlib, signal, sys, threading, time\n"
        "def watch():\n"
        "    while not pathlib.Path('run/checkpoints/latest').exists(): time.sleep(0.05)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "if os.environ['RANK'] == '1' and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "    threading.Thread(target=watch, daemon=True).start()\n"
        "from clap_zero.train import run_and_exit\n"
        "run_and_exit()\n"
    )
    words = [str(BIN / "torchrun"), "--nnodes", "1:2", "--nproc_per_node", "2", "--max_restarts", "2"]
    words += ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0", "--rdzv_conf", "last_call_timeout=2"]
    code, output = run([*words, str(killer), *flags, "--run_dir", "run"], cwd=tmp_path)
    assert code == 0, output
    assert "attempt 2, resumed from " in output
    assert (tmp_path / "run" / "checkpoints" / "step-00000012").is_dir()


@pytest.mark.long
def test_the_command_of_the_kubernetes_manifest_finds_its_place(tmp_path: Path, root: Path, port: int) -> None:
    """Two pods as the operator would set them up: it tells torchrun everything in PET_ variables."""
    manifest = yaml.safe_load((root / "launch" / "kubernetes" / "pytorchjob.yaml").read_text())
    replica = manifest["spec"]["pytorchReplicaSpecs"]["Master"]
    command = replica["template"]["spec"]["containers"][0]["command"]
    words = [str(BIN / command[0]), *(SHOWN if word == MODULE else word for word in command[1:3]), "HOME", "--", "x y"]
    common = {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "2",
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(port),
    }
    pods = [
        subprocess.Popen(
            words,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | common | {"PET_NODE_RANK": str(node), "RANK": str(node), "WORLD_SIZE": "2"},
        )
        for node in range(2)
    ]
    ranks = shown("".join(pod.communicate(timeout=120)[0] for pod in pods))
    assert [pod.returncode for pod in pods] == [0, 0]
    assert [(one["variables"]["RANK"], one["variables"]["LOCAL_RANK"]) for one in ranks] == [
        *(("0", "0"), ("1", "1"), ("2", "0"), ("3", "1")),
    ]
    assert {one["variables"]["WORLD_SIZE"] for one in ranks} == {"4"}
    assert [one["arguments"] for one in ranks] == [["x y"]] * 4
