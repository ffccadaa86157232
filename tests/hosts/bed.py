"""A cluster on one machine: hosts out of namespaces, joined by a bridge, each with its name, sshd, disks and processes.

A host has network, PID, UTS, IPC and mount namespaces of its own and nothing else: the files of this machine are the
disk that all hosts share, until something is mounted over them on one. The bridge lives in a namespace as well, so
nothing on this machine is changed. Every namespace lives as long as its first process, and that ends when the pipe
from here breaks: a test that is killed leaves nothing behind.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import psutil

HERE = Path(__file__).resolve().parent
PROGRAMS = ("unshare", "nsenter", "ip", "pdsh", "ssh", "ssh-keygen", "iptables", "mount")
SSHD = Path("/usr/sbin/sshd")
START_S = 30.0


def why_not() -> str | None:
    """What keeps a bed from being made here; None where nothing does."""
    if os.geteuid() != 0:
        return "hosts out of namespaces need root"
    missing = [name for name in PROGRAMS if shutil.which(name) is None] + ([] if SSHD.exists() else ["sshd"])
    if missing:
        return f"not installed: {', '.join(missing)} (Debian: apt-get install pdsh openssh-server iproute2 iptables)"
    spaces = ["--net", "--uts", "--ipc", "--mount", "--pid", "--fork"]
    probe = ["unshare", *spaces, "ip", "link", "add", "probe", "type", "bridge"]
    done = subprocess.run(probe, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else f"no namespaces here: {done.stderr.strip()}"


class Host:
    """One host of a bed."""

    def __init__(self, name: str, address: str, process: subprocess.Popen[str]) -> None:
        self.name = name
        self.address = address
        self._process = process
        _expect(process, "mounted")
        self.pid = psutil.Process(process.pid).children()[0].pid
        self.pid_namespace = str(Path(f"/proc/{self.pid}/ns/pid").readlink())

    def finish_start(self) -> None:
        """Let the host start its sshd: its network is there."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        _expect(self._process, "ready")

    def enter(self, words: Sequence[str | Path], *, cwd: Path | str = "/") -> list[str]:
        """The command that runs `words` on this host, in the environment that it is started with."""
        namespaces = ["--net", "--uts", "--ipc", "--mount", "--pid"]
        return ["nsenter", "--target", str(self.pid), *namespaces, "--", "env", "-C", str(cwd), *map(str, words)]

    def run(self, *words: str | Path, check: bool = True) -> str:
        """Run a short command on this host and return its output."""
        done = subprocess.run(self.enter(words), capture_output=True, text=True, check=False, timeout=60)
        assert not check or done.returncode == 0, f"{words} on {self.name}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def processes(self) -> list[psutil.Process]:
        """What runs on this host, zombies and sshd left out, each as this machine sees it."""
        found = []
        for one in psutil.process_iter():
            try:
                if str(Path(f"/proc/{one.pid}/ns/pid").readlink()) != self.pid_namespace or one.pid == self.pid:
                    continue
                if one.status() != psutil.STATUS_ZOMBIE and not one.name().startswith("sshd"):
                    found.append(one)
            except (OSError, psutil.NoSuchProcess):
                continue
        return found

    def private_disk(self, path: Path, *, size_bytes: int) -> None:
        """Give this host a disk of its own at a directory that exists; what lies there is hidden from it."""
        self.run("mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "none", path)

    def replace(self, path: Path, by: Path) -> None:
        """Let this host alone see `by` at `path`."""
        self.run("mount", "--bind", by, path)

    def stop_sshd(self) -> None:
        """End the listener, which has no terminal and no parent but process 1."""
        for one in psutil.Process(self.pid).children():
            if one.name().startswith("sshd"):
                one.kill()

    def drop(self, *rule: str) -> None:
        """Add a rule of iptables that drops packets: `drop("OUTPUT", "-o", "eth0")`."""
        self.run("iptables", "-A", *rule, "-j", "DROP")

    def close(self) -> None:
        _end(self._process)


class Bed:
    """Hosts `node1`, `node2`, ... at 10.77.0.1, 10.77.0.2, ...; a context manager."""

    def __init__(
        self,
        folder: Path,
        *,
        num_hosts: int = 2,
        shared_disks: Mapping[Path, int] | None = None,
        wires: Mapping[str, tuple[float, float]] | None = None,
    ) -> None:
        """Make and start the hosts.

        Args:
            folder: An empty directory for keys and settings.
            num_hosts: Two to four, or any other number.
            shared_disks: directory -> bytes: small disks that all hosts see there, and this machine does not.
            wires: host name -> (seconds, share): delay of each packet one way, and loss, on the cable of that host.
        """
        self.folder = folder
        self.hosts: list[Host] = []
        self._wires = dict(wires or {})
        self._helpers: list[subprocess.Popen[str]] = []
        names = [f"node{number}" for number in range(1, num_hosts + 1)]
        self.addresses = {name: f"10.77.0.{number}" for number, name in enumerate(names, start=1)}
        try:
            self._write_settings()
            self._switch = self._start_switch(dict(shared_disks or {}))
            for name in names:
                self.hosts.append(self._start_host(name))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Bed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Take everything down. Safe to call again."""
        for host in self.hosts:
            host.close()
        for helper in reversed(self._helpers):
            _end(helper)

    def host(self, name: str) -> Host:
        return next(host for host in self.hosts if host.name == name)

    def processes(self) -> list[psutil.Process]:
        """What runs on any host, without the bed's own processes."""
        return [one for host in self.hosts for one in host.processes()]

    def link(self, name: str, *, up: bool) -> None:
        """Pull the cable of a host out of the switch, or plug it in again."""
        self._in_switch("ip", "link", "set", self._port(name), "up" if up else "down")

    def power_off(self, name: str) -> None:
        """End everything on a host without a packet to the others, as a power cut does."""
        self.link(name, up=False)
        psutil.Process(self.host(name).pid).kill()

    def seen_by_hosts(self, path: Path) -> Path:
        """Where this machine finds what all hosts see at `path`, on a shared disk too."""
        return Path(f"/proc/{self._switch}/root{path}")

    def hostfile(self, path: Path, *, slots: int = 1) -> Path:
        """Write a hostfile of all hosts."""
        path.write_text("".join(f"{host.name} slots={slots}\n" for host in self.hosts))
        return path

    def _port(self, name: str) -> str:
        return "wire" if name in self._wires else f"to-{name}"

    def _in_switch(self, *words: str) -> None:
        subprocess.run(["nsenter", "--target", str(self._switch), "--net", "--", *words], check=True)

    def _write_settings(self) -> None:
        etc = self.folder / "etc-ssh"
        etc.mkdir(parents=True)
        for key in ("host_key", "user_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", etc / key], check=True)
        shutil.copy(etc / "user_key.pub", etc / "authorized_keys")
        (etc / "sshd_config").write_text(
            "HostKey /etc/ssh/host_key\nAuthorizedKeysFile /etc/ssh/authorized_keys\nPermitRootLogin yes\n"
            "StrictModes no\nUsePAM no\nPasswordAuthentication no\nMaxStartups 100\n"
        )
        # What a user's ~/.ssh/config would say; no time limits, which are the launcher's business.
        (etc / "ssh_config").write_text(
            "Host *\n  IdentityFile /etc/ssh/user_key\n  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n"
            "  LogLevel ERROR\n"
        )
        lines = [f"{address} {name}\n" for name, address in self.addresses.items()]
        (self.folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(lines))

    def _start_switch(self, disks: dict[Path, int]) -> int:
        """Start the process that holds the bridge and the disks that all hosts see."""
        for path in disks:
            path.mkdir(exist_ok=True)
        mounts = "".join(f"mount -t tmpfs -o size={size} none '{path}' && " for path, size in disks.items())
        script = f"{mounts} ip link add switch type bridge && ip link set switch up && echo ready && exec cat"
        process = self._helper(["unshare", "--net", "--mount", "sh", "-c", script])
        _expect(process, "ready")
        return process.pid

    def _start_host(self, name: str) -> Host:
        settings = {
            "name": name,
            "binds": {str(self.folder / "hosts"): "/etc/hosts", str(self.folder / "etc-ssh"): "/etc/ssh"},
        }
        init = [sys.executable, "-I", str(HERE / "host_init.py"), json.dumps(settings)]
        spaces = ["--net", "--uts", "--ipc", "--pid", "--fork", "--kill-child=SIGKILL", "--mount", "--mount-proc"]
        inside = ["nsenter", "--target", str(self._switch), "--mount", "--"]
        process = _start([*inside, "unshare", *spaces, *init])
        try:
            host = Host(name, self.addresses[name], process)
            self._join(host)
            host.finish_start()
        except BaseException:
            _end(process)
            raise
        return host

    def _join(self, host: Host) -> None:
        """Give a host its eth0, joined to the switch by a pair of devices or by a wire that delays."""
        port = self._port(host.name)
        if host.name in self._wires:
            delay_s, loss = self._wires[host.name]
            command = [sys.executable, "-I", str(HERE / "wire.py"), str(host.pid), str(delay_s), str(loss)]
            _expect(self._helper(["nsenter", "--target", str(self._switch), "--net", "--", *command]), "ready")
        else:
            pair = ("type", "veth", "peer", "name", "eth0", "netns", str(host.pid))
            self._in_switch("ip", "link", "add", port, *pair)
        self._in_switch("ip", "link", "set", port, "master", "switch", "up")
        host.run("ip", "address", "add", f"{host.address}/24", "dev", "eth0")
        host.run("ip", "link", "set", "eth0", "up")
        host.run("ip", "link", "set", "lo", "up")

    def _helper(self, words: list[str]) -> subprocess.Popen[str]:
        process = _start(words)
        self._helpers.append(process)
        return process


def _start(words: list[str]) -> subprocess.Popen[str]:
    """Start a process of the bed in a session of its own, so that a Ctrl-C for the tests does not hit it first."""
    pipe = subprocess.PIPE
    return subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True, start_new_session=True)


def _expect(process: subprocess.Popen[str], word: str) -> None:
    """Wait for a line of a process."""
    assert process.stdout is not None
    started = time.monotonic()
    line = process.stdout.readline().strip()
    assert line == word, f"{process.args}: said {line!r}, expected {word!r}, after {time.monotonic() - started:.1f} s"


def _end(process: subprocess.Popen[str]) -> None:
    """Break the pipe of a process of the bed, which ends it; kill it where that does not. Safe to call again."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
