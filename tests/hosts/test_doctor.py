"""The doctor across hosts, one of them not as the others: one line with its name, what is there, what is expected."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hosts import fault_cases
from tests.hosts.bed import Bed
from tests.hosts.faults import Scene
from tests.hosts.jobs import BIN, ROOT, run

pytestmark = pytest.mark.integration


def doctor(bed: Bed, cwd: Path, *flags: str) -> tuple[int, str, list[str]]:
    """Exit code, output and error lines of the doctor on the first host."""
    hostfile = str(bed.hostfile(cwd / "hostfile"))
    of_a_run = ["--ds_config", str(ROOT / "ds_configs" / "zero2.json"), "--run_dir", str(cwd / "run")]
    words = [str(BIN / "clap-zero"), "doctor", "--hostfile", hostfile, *of_a_run, *flags]
    code, output = run(bed.hosts[0], words, cwd=cwd)
    prefix = "clap-zero: error: "
    return code, output, [line.removeprefix(prefix) for line in output.splitlines() if line.startswith(prefix)]


def full_run_disk(scene: Scene) -> None:
    scene.bed.host("node2").private_disk(scene.cwd / "run", size_bytes=fault_cases.TINY_DISK_BYTES)


def private_run_disk(scene: Scene) -> None:
    scene.bed.host("node2").private_disk(scene.cwd / "run", size_bytes=1 << 30)


def stop_sshd(scene: Scene) -> None:
    scene.bed.host("node2").stop_sshd()


def wall(scene: Scene) -> None:
    """Nobody may call the first host, which may call others."""
    scene.bed.host("node1").drop("INPUT", "-p", "tcp", "--syn", "-i", "eth0")


ON_OTHER = r"expected \S+ as on node1 \(here\): .*"
PLACE = r"node2: the run directory's place \S+"
FAULTS: dict[str, tuple[Callable[[Scene], None], str]] = {
    "python": (
        fault_cases.without_python,
        r"node2: there is no \S+ that runs \(.*No such file.*\); expected: Python 3.*node1",
    ),
    "version": (fault_cases.other_version, rf"node2: transformers is 5\.0\.1, {ON_OTHER}"),
    "full disk": (full_run_disk, rf"{PLACE} cannot be written: No space left on device, .*; expected: .*"),
    "deepspeed": (fault_cases.without_deepspeed, rf"node2: deepspeed is not installed, {ON_OTHER}"),
    "code": (
        fault_cases.other_code,
        r"node2: the code of clap_zero is \w+ .*, expected \w+ .* as on node1 \(here\): .*",
    ),
    "private disk": (private_run_disk, rf"{PLACE} is not shared: .*; expected: one disk that all nodes see .*"),
    "shm": (
        fault_cases.full_shared_memory,
        r"node2: shared memory /dev/shm cannot be written: No space .*; expected: .*",
    ),
    "sshd": (stop_sshd, r"node2: ssh does not get in: .*Connection refused; expected: .*"),
    "firewall": (wall, r"node2: 10\.77\.0\.1 port \d+ cannot be reached: .*; expected: open between the nodes .*"),
}
IN_CI = ("python", "version", "full disk")


@pytest.mark.parametrize(
    "name", [name if name in IN_CI else pytest.param(name, marks=pytest.mark.long) for name in FAULTS]
)
def test_the_host_that_is_wrong_is_named_in_one_line(bed: Bed, cwd: Path, name: str) -> None:
    prepare, line = FAULTS[name]
    (cwd / "run").mkdir()
    prepare(Scene(bed, cwd, []))
    code, output, errors = doctor(bed, cwd, "--ranks", "0")
    assert code == 5, output
    assert len(errors) == 1 and re.fullmatch(line, errors[0]), output


@pytest.mark.long
def test_hosts_that_are_alike_pass_and_send_each_other_known_numbers(bed: Bed, cwd: Path) -> None:
    code, output, errors = doctor(bed, cwd)
    assert (code, errors) == (0, []), output
    assert re.search(r"^node1: +0 +node1 +cpu .*\nnode1: +1 +node2 +cpu ", output, re.MULTILINE), output
    assert "known numbers arrived exactly on 2 ranks" in output
