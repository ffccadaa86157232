"""The doctor over a real ssh: an sshd of the test's own on a high port, with keys and configuration of its own."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from clap_zero import cli

SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
REASON = next(
    (f"{name} is not installed here" for name, path in (("sshd", SSHD), ("ssh", shutil.which("ssh"))) if path is None),
    "",
)
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)


@dataclass(frozen=True)
class Bed:
    """An sshd that calls this machine node1, node2 and so on.

    Attributes:
        ssh: How to reach them.
        folder: Of the test; the hostfile is here.
        python: A program that stands for the interpreter on all nodes.
    """

    ssh: str
    folder: Path
    python: Path

    def hostfile(self, *names: str) -> Path:
        path = self.folder / "hostfile"
        path.write_text("".join(f"{name} slots=1\n" for name in names))
        return path


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    folder = tmp_path_factory.mktemp("sshd")
    for key in ("host", "user"):
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)]
        subprocess.run(words, check=True, stdin=subprocess.DEVNULL)
    shutil.copy(folder / "user.pub", folder / "authorized_keys")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    (folder / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/authorized_keys\n"
        f"PidFile {folder}/pid\nStrictModes no\nPasswordAuthentication no\nUsePAM no\nPermitUserEnvironment no\n"
    )
    (folder / "ssh_config").write_text(
        f"Host node*\n  HostName 127.0.0.1\n  Port {port}\n  IdentityFile {folder}/user\n  IdentitiesOnly yes\n"
        f"  UserKnownHostsFile {folder}/known\n  StrictHostKeyChecking no\n  LogLevel ERROR\n"
        f"Host gone\n  HostName 127.0.0.1\n  Port 1\n"
        f"Host stranger\n  HostName 127.0.0.1\n  Port {port}\n  IdentityFile {folder}/host\n  IdentitiesOnly yes\n"
        f"  UserKnownHostsFile {folder}/known\n  StrictHostKeyChecking no\n  LogLevel ERROR\n"
    )
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    with (folder / "log").open("w") as log:
        daemon = subprocess.Popen([str(SSHD), "-D", "-e", "-f", str(folder / "sshd_config")], stderr=log)
    try:
        deadline = time.monotonic() + 20
        while daemon.poll() is None and time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                time.sleep(0.05)
        if daemon.poll() is not None:
            pytest.skip(f"sshd does not start here: {(folder / 'log').read_text()[-300:]}")
        yield Bed(f"ssh -F {folder / 'ssh_config'}", folder, folder / "python")
    finally:
        daemon.terminate()
        daemon.wait(timeout=20)


Doctor = Callable[..., tuple[int, str, list[str]]]


@pytest.fixture
def doctor(bed: Bed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Doctor:
    """Runs the doctor over hosts whose interpreter is a script: (exit code, output, error lines)."""

    def call(*hosts: str, python: str = "", flags: tuple[str, ...] = ()) -> tuple[int, str, list[str]]:
        bed.python.write_text(python or f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
        bed.python.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(bed.python))
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        words = ["doctor", "--hostfile", str(bed.hostfile(*hosts)), "--ssh", bed.ssh, "--ranks", "0", *flags]
        code = cli.main(words)
        out = capsys.readouterr()
        return code, out.out, [line.removeprefix("clap-zero: error: ") for line in out.err.splitlines()]

    return call


def test_nodes_that_are_alike_pass(doctor: Doctor) -> None:
    code, out, errors = doctor("node1", "node2")
    assert (code, errors) == (0, [])
    rows = [line.split() for line in out.splitlines()]
    assert [row[0] for row in rows if row and row[0].startswith("node")] == ["node1", "node2"]
    assert "nothing that would spoil a run was found" in out
    assert "no GPU on any host of the file" in out


def test_a_head_node_outside_the_hostfile_needs_no_gpu(doctor: Doctor, tmp_path: Path) -> None:
    patch = (
        "import clap_zero.preflight.node as n\nfrom clap_zero.preflight.gpus import Gpu\n"
        "n.find_gpus = lambda visible: ([Gpu(0, 'NVIDIA H200', 1 << 37, 0, '570')], [])\n"
    )
    code, out, errors = doctor("node1", "node2", python=changed(tmp_path, patch))
    assert (code, errors) == (0, []), out
    assert "1 x NVIDIA H200" in out and "CPUs" not in out


def test_a_node_that_ssh_does_not_reach_is_named(doctor: Doctor) -> None:
    code, _, errors = doctor("node1", "gone", "stranger")
    assert code == 5
    assert len(errors) == 2
    assert errors[0].startswith("gone: ssh does not get in: ") and "Connection refused" in errors[0]
    assert errors[1].startswith("stranger: ssh does not get in: ") and "Permission denied" in errors[1]
    assert all("expected: a login without a password" in line for line in errors)


@pytest.mark.parametrize(
    ("script", "parts"),
    [
        ("import platform; print('Python 3.9.2') if '-c' in sys.argv else sys.exit(1)", ("Python 3.9.2",)),
        (
            "sys.exit('No module named clap_zero') if '-m' in sys.argv else print('Python ' + VERSION)",
            ("no clap_zero",),
        ),
        ("os.kill(os.getpid(), 9)", ("fails with",)),
    ],
)
def test_a_wrong_python_is_one_line_with_what_is_expected(doctor: Doctor, script: str, parts: tuple[str, ...]) -> None:
    program = f"#!{sys.executable}\nimport os, platform, sys\nVERSION = platform.python_version()\n{script}\n"
    code, _, errors = doctor("node1", python=program)
    assert code == 5
    assert len(errors) == 1
    assert errors[0].startswith("node1: ")
    assert all(part in errors[0] for part in (*parts, "expected: Python 3.", "clap_zero"))


def test_a_missing_python_is_told(doctor: Doctor, bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, errors = doctor("node1", python="#!/nowhere/python\n")
    assert code == 5
    assert len(errors) == 1
    assert errors[0].startswith("node1: there is no ") and "that runs" in errors[0] and "expected: Python" in errors[0]


CHANGED = """#!{python}
import sys
sys.path.insert(0, {folder!r})
if "-m" in sys.argv:
    import {patch}
    import clap_zero.preflight.node
    sys.exit(clap_zero.preflight.node.main())
"""


def changed(folder: Path, patch: str) -> str:
    """An interpreter that runs the node's part after some code of the test's."""
    (folder / "patched.py").write_text(patch)
    return CHANGED.format(python=sys.executable, folder=str(folder), patch="patched")


def test_another_version_of_a_package_is_one_line(doctor: Doctor, tmp_path: Path) -> None:
    """An environment in which another deepspeed is found first."""
    info = tmp_path / "deepspeed-0.19.7.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.19.7\n")
    code, _, errors = doctor("node1", python=changed(tmp_path, ""))
    assert code == 5
    assert len(errors) == 1
    assert errors[0].startswith("node1: deepspeed is 0.19.7, expected ")
    assert "(here): in the environment of" in errors[0]


def test_other_code_is_one_line_with_both_commits(doctor: Doctor, tmp_path: Path) -> None:
    patch = "import clap_zero.preflight.machine as m\nm.code_hash = lambda: '0' * 12\nm.commit = lambda: 'abc'\n"
    code, _, errors = doctor("node1", python=changed(tmp_path, patch))
    assert code == 5
    assert len(errors) == 1
    assert errors[0].startswith("node1: the code of clap_zero is 000000000000 (commit abc), expected ")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_is_one_line_with_the_room(doctor: Doctor, tmp_path: Path) -> None:
    """The kernel's own full device behind the probe of the run directory."""
    patch = (
        "import os, tempfile\nreal = tempfile.mkstemp\n"
        "def full(*args, dir=None, **more):\n"
        "    descriptor, name = real(*args, dir=dir, **more)\n"
        "    if str(dir).endswith('runs'):\n"
        "        os.dup2(os.open('/dev/full', os.O_WRONLY), descriptor)\n"
        "    return descriptor, name\n"
        "tempfile.mkstemp = full\n"
    )
    (tmp_path / "runs").mkdir()
    flags = ("--ds_config", "ds_configs/zero2.json", "--run_dir", str(tmp_path / "runs"))
    code, _, errors = doctor("node1", python=changed(tmp_path, patch), flags=flags)
    assert code == 5
    assert len(errors) == 1
    assert errors[0].startswith(
        f"node1: the run directory's place {tmp_path / 'runs'} cannot be written: No space left"
    )
    assert "expected: room for the run, at least 100 MB" in errors[0]


def test_a_clock_that_is_apart_is_a_warning(doctor: Doctor, tmp_path: Path) -> None:
    patch = "import time\nreal = time.time\ntime.time = lambda: real() - 600\n"
    code, out, _ = doctor("node1", python=changed(tmp_path, patch))
    assert code == 0
    assert "warning: node1: its clock is 60" in out.replace("59", "60") and "s behind" in out


def test_a_disk_that_is_not_shared_is_found_by_the_token(doctor: Doctor, tmp_path: Path) -> None:
    patch = "import clap_zero.preflight.node as n\nn.sees_mark = lambda directory, token: False\n"
    code, _, errors = doctor("node1", python=changed(tmp_path, patch))
    assert code == 5
    assert len(errors) == 1
    assert errors[0].startswith("node1: the run directory's place ") and "is not shared" in errors[0]


def test_paths_with_blanks_and_quotes_arrive(bed: Bed, tmp_path: Path, monkeypatch, capsys) -> None:
    """The one thing that a shell on the node reads."""
    odd = tmp_path / "it's a $(touch here) folder"
    odd.mkdir()
    monkeypatch.chdir(odd)
    hostfile = str(bed.hostfile("node1"))
    assert cli.main(["doctor", "--hostfile", hostfile, "--ssh", bed.ssh, "--ranks", "0"]) == 0, capsys.readouterr().err
    assert not list(odd.iterdir())
