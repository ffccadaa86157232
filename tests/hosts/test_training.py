"""The same training on one host and on two: through each launcher, and from one to the other."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.hosts.bed import Bed
from tests.hosts.jobs import (
    BIN,
    ENV_FILE,
    FLAGS,
    MODULE,
    deepspeed,
    kill,
    losses,
    rank_processes,
    run,
    start,
    wait_for_step,
    wait_until_gone,
)

pytestmark = pytest.mark.integration
NUM_STEPS = 6


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, data: list[str]) -> dict[int, float]:
    """The losses of two ranks on one host."""
    folder = tmp_path_factory.mktemp("alone")
    with Bed(folder / "bed", num_hosts=1) as bed:
        code, output = run(bed.hosts[0], deepspeed(None, *flags(data)), cwd=folder)
    assert code == 0, output
    return losses(folder / "run")


def flags(data: list[str], *, num_steps: int = NUM_STEPS) -> list[str]:
    return [*FLAGS, *data, "--train.max_steps", str(num_steps)]


def assert_same(got: dict[int, float], wanted: dict[int, float], output: str) -> None:
    assert len(wanted) == NUM_STEPS and got.keys() >= wanted.keys(), output
    for step, loss in wanted.items():
        assert got[step] == pytest.approx(loss, rel=1e-6), f"step {step}"


def test_two_hosts_over_pdsh_train_as_one_does_until_a_rank_is_killed(
    bed: Bed, cwd: Path, data: list[str], alone: dict[int, float]
) -> None:
    """One start for both, since it costs most. The schedule is constant: the length changes no loss."""
    words = deepspeed(bed.hostfile(cwd / "hostfile"), *flags(data, num_steps=100_000))
    job = start(bed.hosts[0], words, cwd=cwd)
    wait_for_step(cwd / "run", NUM_STEPS, job)
    (rank,) = rank_processes(bed.hosts[1])
    kill(rank)
    seconds = wait_until_gone(bed, timeout_s=60)
    code = job.wait(timeout_s=10)
    assert_same(losses(cwd / "run"), alone, job.output)
    told = [line for line in job.output.splitlines() if "clap_zero" in line and "rank 1 on node2" in line]
    # The larger of the hosts' codes: 5, or that of launch.py after a kill.
    assert code in (5, 247) and any("died" in line for line in told), f"{code} after {seconds:.1f} s\n{job.output}"


def command_of(launcher: str, bed: Bed, number: int) -> list[str]:
    """What a user types on host `number` for a launcher that is started on each host by hand."""
    address, port = bed.hosts[0].address, "29511"
    if launcher == "torchrun":
        options = ["--nnodes", "2", "--nproc_per_node", "1", "--node_rank", str(number)]
        return [str(BIN / "torchrun"), *options, "--master_addr", address, "--master_port", port, "-m", MODULE]
    if launcher == "torchrun elastic":
        options = ["--nnodes", "1:2", "--nproc_per_node", "1", "--rdzv_backend", "c10d", "--rdzv_id", "bed"]
        return [str(BIN / "torchrun"), *options, "--rdzv_endpoint", f"{address}:{port}", "-m", MODULE]
    if launcher == "accelerate":
        options = ["--multi_gpu", "--num_machines", "2", "--num_processes", "2", "--machine_rank", str(number)]
        options += ["--main_process_ip", address, "--main_process_port", port, "--mixed_precision", "no"]
        return [str(BIN / "accelerate"), "launch", *options, "--dynamo_backend", "no", "-m", MODULE]
    options = ["--hostfile", "hostfile", "--no_ssh", "--node_rank", str(number)]
    return [str(BIN / "deepspeed"), *options, "--master_addr", address, "--master_port", port, "-m", MODULE]


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["torchrun", "torchrun elastic", "accelerate", "deepspeed --no_ssh"])
def test_launchers_that_are_started_on_each_host(
    bed: Bed, cwd: Path, data: list[str], alone: dict[int, float], launcher: str
) -> None:
    bed.hostfile(cwd / "hostfile")
    results: dict[int, tuple[int, str]] = {}

    def start_on(number: int) -> None:
        words = [*command_of(launcher, bed, number), *flags(data)]
        results[number] = run(bed.hosts[number], words, cwd=cwd)

    threads = [threading.Thread(target=start_on, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    output = "\n".join(text for _, text in results.values())
    assert [results[number][0] for number in range(2)] == [0, 0], output
    assert_same(losses(cwd / "run"), alone, output)


@pytest.mark.long
def test_a_run_goes_on_across_hosts(
    bed: Bed, tmp_path: Path, cwd: Path, data: list[str], alone: dict[int, float]
) -> None:
    """Three steps on one host with two ranks, the rest on two hosts with one each."""
    code, output = run(bed.hosts[0], deepspeed(None, *flags(data), "--checkpoint.every_steps", "3"), cwd=cwd)
    assert code == 0, output
    assert_same(losses(cwd / "run"), alone, output)
    other = tmp_path / "other"
    other.mkdir()
    (other / ".deepspeed_env").write_text(ENV_FILE)
    first = cwd / "run" / "checkpoints" / "step-00000003"
    words = deepspeed(bed.hostfile(other / "hostfile"), *flags(data), "--resume", str(first))
    code, output = run(bed.hosts[0], words, cwd=other)
    assert code == 0, output
    got = losses(other / "run")
    assert list(got) == [4, 5, 6], output
    for step, loss in got.items():
        assert loss == pytest.approx(alone[step], rel=1e-6), f"step {step}"
