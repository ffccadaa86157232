"""The bed itself: hosts that are apart where real ones are, and nothing left of them."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.hosts.bed import Bed

pytestmark = pytest.mark.integration
ROOT = Path(__file__).resolve().parents[2]


def test_hosts_reach_each_other_by_name_and_are_apart(tmp_path: Path) -> None:
    shared, private = tmp_path / "shared", tmp_path / "private"
    for folder in (shared, private):
        folder.mkdir()
    with Bed(tmp_path / "bed", num_hosts=3, shared_disks={shared: 1 << 20}) as bed:
        first, second, third = bed.hosts
        out = first.run("pdsh", "-S", "-R", "ssh", "-w", "node1,node2,node3", "hostname -I; hostname")
        for host in bed.hosts:
            assert f"{host.name}: {host.address}" in out and f"{host.name}: {host.name}" in out
        second.private_disk(private, size_bytes=1 << 20)
        second.run("touch", private / "mine", shared / "ours")
        assert third.run("ls", shared, private).split() == [f"{private}:", f"{shared}:", "ours"]
        assert list(shared.iterdir()) == [] and [p.name for p in bed.seen_by_hosts(shared).iterdir()] == ["ours"]
        # The cable of one host: both directions, for that host alone.
        bed.link("node2", up=False)
        assert first.run("timeout", "2", "ssh", "node2", "true", check=False) == ""
        assert first.run("ssh", "node3", "hostname").strip() == "node3"
        bed.link("node2", up=True)
        assert first.run("ssh", "node2", "hostname").strip() == "node2"
        third.stop_sshd()
        assert "refused" in first.run("ssh", "node3", "true", check=False)
        bed.power_off("node2")
        assert first.run("timeout", "2", "ssh", "node2", "true", check=False) == ""
        assert bed.processes() == []
    assert not psutil.pid_exists(first.pid)


def test_a_wire_delays(tmp_path: Path) -> None:
    with Bed(tmp_path / "bed", wires={"node2": (0.1, 0.0)}) as bed:
        started = time.monotonic()
        assert bed.host("node1").run("ssh", "node2", "hostname").strip() == "node2"
        # The handshakes of TCP and ssh take more than five round trips.
        assert time.monotonic() - started > 1.0


def test_a_killed_test_run_leaves_no_host_behind(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from tests.hosts.bed import Bed\n"
        "bed = Bed(Path(sys.argv[1]), wires={'node2': (0.01, 0.0)})\n"
        "print(*(host.pid for host in bed.hosts), flush=True); time.sleep(60)"
    )
    words = [sys.executable, "-c", script, str(tmp_path / "bed")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        hosts = [int(word) for word in process.stdout.readline().split()]
        left = [*psutil.Process(process.pid).children(recursive=True)]
        assert len(hosts) == 2 and {one.pid for one in left} >= set(hosts)
        process.kill()
    gone, alive = psutil.wait_procs(left, timeout=10)
    assert alive == [] and len(gone) == len(left)
