"""Hosts that are asked over ssh, ports, and what one machine has and leaves."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest

from clap_zero.errors import LaunchError
from clap_zero.launching import hosts, local
from clap_zero.launching.environment import Variable, pack


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def test_hosts_are_asked_without_a_master_and_many_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An ssh that leaves a process with our pipe behind, as an old one does with ControlPersist."""
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\necho "$@" >>asked\nsleep 3 &\ncase "$*" in *host77*) exit 81;; esac\nexit 0\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("PDSH_SSH_ARGS_APPEND", "-i key")
    monkeypatch.setattr(hosts, "REACH_TIMEOUT_S", 1)
    begin = time.monotonic()
    with pytest.raises(LaunchError, match="host0 does not answer over ssh within 1 s"):
        hosts.check_reachable([f"host{n}" for n in range(3)], ssh_port=7)
    assert time.monotonic() - begin < 2.5, "what holds the pipe is not waited for"
    ssh.write_text(ssh.read_text().replace("sleep 3 &", ""))
    with pytest.raises(LaunchError, match="host77 has no folder "):
        hosts.check_reachable([f"host{n}" for n in range(100)], ssh_port=None)
    assert "-o ControlMaster=no -i key -p 7 host0 cd " in Path("asked").read_text()


def test_a_launcher_is_asked_for_with_its_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the LD_LIBRARY_PATH of .deepspeed_env it would not start, and a job that ends well be called broken."""
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\nfor question; do :; done\nexec sh -c "$question"\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    launcher = tmp_path / "libraries" / "deepspeed" / "launcher"
    launcher.mkdir(parents=True)
    for package in (launcher.parent, launcher):
        (package / "__init__.py").touch()
    refusal = "import os\nif os.environ.get('NEEDED') != 'a $b':\n    raise ImportError('no a')\n"
    (launcher / "launch.py").write_text(refusal)
    path = {"PYTHONPATH": str(tmp_path / "libraries")}
    told = hosts.launcher_trouble("node2", ssh_port=None, variables=path)
    assert told == "node2: DeepSpeed's launcher does not start there: ImportError: no a"
    needed = pack({"NEEDED": Variable("a $b")}, shell=True).shown
    assert hosts.launcher_trouble("node2", ssh_port=None, variables={**path, **needed}) is None


@pytest.mark.skipif(os.geteuid() == 0, reason="root may listen everywhere")
def test_a_port_of_root_is_not_called_taken() -> None:
    assert hosts.port_trouble(80) == "needs more rights than you have"


def test_a_graphics_card_for_a_screen_is_no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """`/dev/dri/renderD128` is on every laptop."""
    found = [path for pattern in local._OTHER_HARDWARE for path in Path("/dev").glob(pattern)]
    monkeypatch.setattr(local, "_INTEL", "null")
    assert local._other_accelerator() == bool(found)


def test_a_killed_launcher_leaves_nothing_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local.tempfile, "tempdir", str(tmp_path))
    (tmp_path / f"clap-zero-launch-{socket.gethostname()}-x").mkdir()
    elsewhere = tmp_path / "clap-zero-launch-other.host-x"
    elsewhere.mkdir()
    first, second = local.private_folder(), local.private_folder()
    assert sorted(tmp_path.iterdir()) == sorted([first, second, elsewhere])
    assert first.stat().st_mode & 0o777 == 0o700
