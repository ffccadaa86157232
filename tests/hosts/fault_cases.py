"""The faults that are tested and measured, by name."""

from __future__ import annotations

import importlib.metadata
import os
import resource
import signal
import subprocess
import sysconfig
from pathlib import Path

import psutil

from tests.hosts.faults import Fault, Scene
from tests.hosts.jobs import BIN, find, kill, rank_processes
from tests.processes import command_of, words_of

SECOND = {"host": r"\bnode2\b", "rank": r"\brank 1\b"}
FIRST = {"host": r"\bnode1\b", "rank": r"\brank 0\b"}
TINY_DISK_BYTES = 16 << 10
FULL_DISK_BYTES = 256 << 20


def rank_on(scene: Scene, host: str, number: int = 0) -> psutil.Process:
    """A training process on a host, by its local rank."""
    return next(p for p in rank_processes(scene.bed.host(host)) if p.environ()["LOCAL_RANK"] == str(number))


def kill_rank(scene: Scene) -> None:
    kill(rank_on(scene, "node2"))


def kill_first_rank(scene: Scene) -> None:
    kill(rank_on(scene, "node1"))


def kill_launch_py(scene: Scene) -> None:
    # The shell that sshd starts has the same words on its command line; Python's has them one by one.
    words = ["-u", "-m", "deepspeed.launcher.launch"]
    kill(next(p for p in scene.bed.host("node2").processes() if words_of(p)[1:4] == words))


def kill_front(scene: Scene) -> None:
    kill(find(scene.bed.host("node1"), f"{BIN}/deepspeed"))


def stop_rank(scene: Scene) -> None:
    rank_on(scene, "node2").send_signal(signal.SIGSTOP)


def starve_rank(scene: Scene) -> None:
    """No more address space than it has: its next larger allocation fails."""
    rank = rank_on(scene, "node2")
    limit = rank.memory_info().vms
    resource.prlimit(rank.pid, resource.RLIMIT_AS, (limit, limit))


def kill_loader_worker(scene: Scene) -> None:
    """The youngest process of a rank's fork server, as the kernel's out-of-memory killer would."""
    server_and_workers = rank_on(scene, "node2").children(recursive=True)
    workers = [p for p in server_and_workers if "forkserver" in command_of(psutil.Process(p.ppid()))]
    kill(max(workers, key=psutil.Process.create_time))


def interrupt(scene: Scene) -> None:
    """Ctrl-C in the terminal of the first host: all processes in front get it."""
    for one in scene.bed.host("node1").processes():
        if os.getpgid(one.pid) == scene.job.process.pid:
            one.send_signal(signal.SIGINT)


def without_deepspeed(scene: Scene) -> None:
    """A Python at the same path in which DeepSpeed is not installed."""
    empty = scene.cwd / "empty"
    empty.mkdir()
    scene.bed.host("node2").replace(Path(sysconfig.get_path("purelib")) / "deepspeed", empty)


def broken_torch(scene: Scene) -> None:
    """torch is there and does not load: DeepSpeed's launch.py fails on that host before it has started a rank."""
    import torch

    changed = scene.cwd / "broken.py"
    changed.write_text(
        'raise ImportError("libcudart.so.13: cannot open shared object file: No such file or directory")\n'
    )
    scene.bed.host("node2").replace(Path(torch.__file__), changed)


def without_python(scene: Scene) -> None:
    empty = scene.cwd / "empty"
    empty.mkdir()
    scene.bed.host("node2").replace(BIN, empty)


def other_version(scene: Scene) -> None:
    """transformers of another version, as its metadata says."""
    distribution = importlib.metadata.distribution("transformers")
    metadata = next(Path(str(distribution.locate_file(f))) for f in distribution.files or () if f.name == "METADATA")
    changed = scene.cwd / "METADATA"
    changed.write_text(metadata.read_text().replace(f"\nVersion: {distribution.version}\n", "\nVersion: 5.0.1\n"))
    scene.bed.host("node2").replace(metadata, changed)


def other_code(scene: Scene) -> None:
    """A file of the package that is not the same on both hosts."""
    import clap_zero.training.schedule as module

    file = Path(module.__file__)
    changed = scene.cwd / "schedule.py"
    changed.write_text(file.read_text() + "\n# changed on this host only\n")
    scene.bed.host("node2").replace(file, changed)


def private_run_directory(scene: Scene) -> None:
    run = scene.cwd / "run"
    run.mkdir()
    scene.bed.host("node2").private_disk(run, size_bytes=1 << 30)


def full_temporary_disk(scene: Scene) -> None:
    """TMPDIR of the second host takes nothing any more, not even an empty directory."""
    folder = scene.cwd / "scratch"
    folder.mkdir()
    scene.env_file += f"TMPDIR={folder}\n"
    host = scene.bed.host("node2")
    host.run("mount", "-t", "tmpfs", "-o", "size=16k,nr_inodes=2", "none", folder)
    host.run("mkdir", folder / "taken")


def full_shared_memory(scene: Scene) -> None:
    scene.bed.host("node2").private_disk(Path("/dev/shm"), size_bytes=TINY_DISK_BYTES)


def fill_run_disk(scene: Scene) -> None:
    """The disk of the run fills up while it trains."""
    words = ["dd", "if=/dev/zero", f"of={scene.run_dir}/ballast", "bs=64k"]
    subprocess.run(words, capture_output=True, check=False)  # until it is full


def fault(name: str, cause: str, where: dict[str, str] | None = None, **others: object) -> Fault:
    return Fault(name, {**(SECOND if where is None else where), "cause": cause}, **others)  # type: ignore[arg-type]


SILENT = r"not been heard of|no contact with|lost contact|is gone|died"
DIED = r"killed|died|SIGKILL"
RUN_DISK = {"makes": lambda cwd: {"shared_disks": {cwd / "run": FULL_DISK_BYTES}}}

FAULTS = (
    fault("one rank killed (SIGKILL)", DIED, inject=kill_rank),
    fault("rank 0 killed (SIGKILL)", DIED, FIRST, inject=kill_first_rank),
    fault("one of four ranks killed, three in a collective", DIED, {"host": r"\bnode2\b", "rank": r"\brank 2\b"},
          inject=kill_rank, slots=2),
    fault("launch.py of one host killed", r"launcher|died", inject=kill_launch_py),
    fault("`deepspeed` command killed", r"launcher|command|connection", {}, inject=kill_front, codes=frozenset({-9})),
    fault("cable of the second host pulled", SILENT, inject=lambda s: s.bed.link("node2", up=False)),
    fault("cable of the first host pulled", SILENT, inject=lambda s: s.bed.link("node1", up=False)),
    fault("second host loses its power", SILENT, inject=lambda s: s.bed.power_off("node2")),
    fault("all packets from the second host lost", SILENT,
          inject=lambda s: s.bed.host("node2").drop("OUTPUT", "-o", "eth0")),
    fault("all packets to the second host lost", SILENT,
          inject=lambda s: s.bed.host("node2").drop("INPUT", "-i", "eth0")),
    fault("one rank stopped (SIGSTOP)", r"not been heard of|stuck|hang", inject=stop_rank),
    fault("one rank out of memory", r"memory", inject=starve_rank, codes=frozenset({1, 5})),
    fault("one rank fails before the ranks meet", r"failed in .*planted fault", codes=frozenset({1, 5}),
          prepare=lambda s: s.plant("node2", "clap_zero.distributed.world._complete_environment")),
    fault("torch cannot be imported on one host", r"does not start there: ImportError", {"host": r"\bnode2\b"},
          codes=frozenset({1, 5}), prepare=broken_torch),
    fault("one rank killed (SIGKILL) before the ranks meet", r"died in (start|imports)", inject=kill_rank, at_step=0),
    fault("rank 0 killed (SIGKILL) before the ranks meet", r"died in (start|imports)", FIRST, inject=kill_first_rank,
          at_step=0),
    fault("one rank raises in build", r"planted fault", codes=frozenset({1, 5}),
          prepare=lambda s: s.plant("node2", "clap_zero.training.setup.build")),
    fault("exception in a loader worker", r"planted fault", codes=frozenset({3, 5}),
          prepare=lambda s: s.plant("node2", "clap_zero.data.pipeline._train_batch", after=6)),
    fault("loader worker killed (SIGKILL)", r"worker.*(SIGKILL|-9|killed)", inject=kill_loader_worker,
          codes=frozenset({3, 5})),
    fault("no Python at that path on one host", r"has no .*python|No such file", {"host": r"\bnode2\b"},
          prepare=without_python, starts=False),
    fault("a Python without DeepSpeed on one host", r"lacks deepspeed", {"host": r"\bnode2\b"},
          prepare=without_deepspeed, starts=False),
    fault("another version of a package on one host", r"transformers.*5\.0\.1", {"host": r"\bnode2\b"},
          prepare=other_version),
    fault("other code on one host", r"commit|files of|code of", {"host": r"\bnode2\b"}, prepare=other_code),
    fault("run directory not shared", r"not the same|not share|does not see|shared", {"host": r"\bnode2\b"},
          prepare=private_run_directory, codes=frozenset({2, 4, 5})),
    fault("temporary directory full on one host", r"No space|full", {"host": r"\bnode2\b"},
          prepare=full_temporary_disk, codes=frozenset({1, 3, 5})),
    fault("/dev/shm full on one host", r"/dev/shm|shared memory|No space", {"host": r"\bnode2\b"},
          prepare=full_shared_memory, codes=frozenset({1, 3, 5})),
    fault("disk of the run full while training", r"No space|full", {}, inject=fill_run_disk,
          codes=frozenset({4, 5}), flags=("--checkpoint.every_steps", "8"), **RUN_DISK),
    # pdsh ends its ssh at once, and with it all that the ranks say.
    Fault("Ctrl-C", {}, inject=interrupt, codes=frozenset({1, 75, 130, -2}), leaves=("checkpoints/latest",)),
    fault("sshd of one host down at the start", r"refused|not reachable|cannot be reached", {"host": r"\bnode2\b"},
          prepare=lambda s: s.bed.host("node2").stop_sshd(), starts=False),
    Fault("20 ms delay and 1 % loss", {}, survives=True, num_steps=8,
          makes=lambda cwd: {"wires": {"node2": (0.01, 0.01)}}),
)  # fmt: skip
