"""The place of a process among the others, from whatever launched it."""

from __future__ import annotations

import pytest
import torch

from clap_zero.distributed import world
from clap_zero.errors import LaunchError

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")
MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
SLURM = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_ID")


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch):
    """Sets exactly these variables, without those that this test run itself may have."""

    def set_them(**values: object) -> None:
        for name in (*NAMES, *SLURM, *MPI[0], *MPI[1]):
            monkeypatch.delenv(name, raising=False)
        for name, value in values.items():
            monkeypatch.setenv(name, str(value))

    return set_them


def test_without_a_launcher_the_process_is_alone(variables) -> None:
    variables()
    assert world.read_launch_environment() == world.LaunchEnvironment(0, 1, 0, 1)
    assert not world.was_launched() and world.describe_process() == ""


def test_deepspeed_and_torchrun_name_the_local_size_differently(variables) -> None:
    place = {"RANK": 5, "WORLD_SIZE": 8, "LOCAL_RANK": 1, "MASTER_ADDR": "a"}
    for name in ("LOCAL_SIZE", "LOCAL_WORLD_SIZE"):
        variables(**place, **{name: 4})
        assert world.read_launch_environment() == world.LaunchEnvironment(5, 8, 1, 4)
    assert world.was_launched() and world.describe_process().startswith("rank 5 on ")


@pytest.mark.parametrize(("tasks", "node", "size"), [("8(x2)", 1, 8), ("8(x2),4", 2, 4), ("3,5", 1, 5), ("16", 0, 16)])
def test_slurm_counts_ranks_by_host(variables, tasks: str, node: int, size: int) -> None:
    variables(
        SLURM_PROCID=9, SLURM_NTASKS=20, SLURM_LOCALID=1, SLURM_NODEID=node, SLURM_STEP_ID=0,
        SLURM_STEP_TASKS_PER_NODE=tasks, MASTER_ADDR="a",
    )  # fmt: skip
    assert world.read_launch_environment() == world.LaunchEnvironment(9, 20, 1, size)
    assert world.was_launched() and not world.speaks_for_host()


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"RANK": 1, "WORLD_SIZE": 2}, "MASTER_ADDR is not set"),
        ({"RANK": "x", "WORLD_SIZE": 2, "MASTER_ADDR": "a"}, "RANK is 'x', not a whole number"),
        ({"RANK": 2, "WORLD_SIZE": 2, "MASTER_ADDR": "a"}, "does not fit WORLD_SIZE=2"),
        (
            {"SLURM_PROCID": 0, "SLURM_NTASKS": 2, "SLURM_STEP_TASKS_PER_NODE": "2(y)", "MASTER_ADDR": "a"},
            "SLURM_STEP_TASKS_PER_NODE is '2(y)'",
        ),
    ],
)
def test_variables_that_do_not_fit_are_named(variables, values: dict, part: str) -> None:
    variables(**values)
    with pytest.raises(LaunchError, match=part.replace("(", r"\(").replace(")", r"\)")):
        world.read_launch_environment()


def test_cores_and_memory_are_shared_by_the_ranks_of_a_host() -> None:
    alone, one_of_many = (world.World(0, n, 0, n, torch.device("cpu")) for n in (1, 1000))
    assert world.cores_per_rank(alone) >= world.cores_per_rank(one_of_many) == 1
    assert world.memory_bytes(one_of_many) == world.memory_bytes(alone) // 1000 > 0


def test_the_exit_code_is_left_where_the_scripts_look(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("CLAP_ZERO_EXIT_CODES", str(tmp_path))
    monkeypatch.setenv("RANK", "3")
    world.report_exit_code(None)
    assert (tmp_path / "rank3").read_text() == "running\n"
    world.report_exit_code(75)
    assert (tmp_path / "rank3").read_text() == "75\n"
    monkeypatch.setenv("CLAP_ZERO_EXIT_CODES", str(tmp_path / "gone"))
    world.report_exit_code(0)


@pytest.mark.parametrize("names", MPI, ids=lambda names: names[0])
def test_mpirun_tells_the_place_in_names_of_its_own(variables, names: tuple[str, ...]) -> None:
    variables(**dict(zip(names, (5, 8, 1, 4), strict=True)), MASTER_ADDR="a")
    assert world.read_launch_environment() == world.LaunchEnvironment(5, 8, 1, 4)
    assert world.was_launched() and not world.speaks_for_host()
    assert world.describe_process().startswith("rank 5 on ")


def test_the_shell_of_a_slurm_job_is_no_rank(variables) -> None:
    """sbatch calls its script task 0 of all, without the counts of a step."""
    variables(SLURM_PROCID=0, SLURM_NTASKS=8, SLURM_LOCALID=0)
    assert world.read_launch_environment() == world.LaunchEnvironment(0, 1, 0, 1)
