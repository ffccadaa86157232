"""What the guard makes of commands of `deepspeed`, and what the user reads where it starts nothing."""

from __future__ import annotations

import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from clap_zero.errors import ConfigError, LaunchError
from clap_zero.launching import guard, local, options

BIN = Path(sys.executable).parent
needs_pdsh = pytest.mark.skipif(shutil.which("pdsh") is None, reason="pdsh is not installed (apt-get install pdsh)")
UUIDS = ["GPU-0a11", "GPU-0b22", "GPU-0b33", "GPU-1c44"]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR", "DS_ENV_FILE", "CLAP_ZERO_FORWARD"):
        monkeypatch.setenv(name, "")  # so that what the guard sets is undone
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with four GPUs; the driver is not here to be asked."""
    monkeypatch.setattr(local, "gpu_uuids", lambda: UUIDS)


@pytest.fixture
def listener() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        yield taken.getsockname()[1]


def checked(line: str, *arguments: str) -> list[str]:
    command = options.read([*line.split(), "--module", "clap_zero.train", *arguments])
    assert command is not None
    return guard.check(command).as_argv()


def refused(line: str, *arguments: str, kind: type[Exception] = ConfigError) -> str:
    with pytest.raises(kind) as caught:
        checked(line, *arguments)
    return str(caught.value)


def hostfile(text: str) -> str:
    path = Path("hosts")
    path.write_text(text)
    return str(path)


def test_l06_more_gpus_than_there_are(four_gpus) -> None:
    assert refused("--num_gpus 5") == "--num_gpus 5: this machine has 4 GPU(s)"
    assert "--num_gpus=4" in checked("--num_gpus 4")


def test_l06_visible_devices_are_honoured_with_num_gpus(four_gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed would take GPU 0, and drop the variable."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert not any(word.startswith("--num_gpus") for word in checked("--num_gpus 1"))
    assert local.os.environ["CUDA_VISIBLE_DEVICES"] == "3"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    assert refused("--num_gpus 3") == "--num_gpus 3: this machine has 2 GPU(s) in CUDA_VISIBLE_DEVICES=1,2"


def test_l06_uuids_become_numbers(four_gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1c44,GPU-0a")
    checked("")
    assert local.os.environ["CUDA_VISIBLE_DEVICES"] == "3,0"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("7", "CUDA_VISIBLE_DEVICES=7: this machine has no GPU '7'; it has 0 to 3"),
        ("GPU-0b", "CUDA_VISIBLE_DEVICES=GPU-0b: this machine has no GPU 'GPU-0b'; it has 0 to 3"),
        (
            "MIG-x",
            "CUDA_VISIBLE_DEVICES=MIG-x: DeepSpeed's launcher knows devices by number only, and a slice of a GPU has "
            "none: start with `torchrun --nproc_per_node 1 -m clap_zero.train`",
        ),
    ],
)
def test_l06_devices_that_are_not_there(four_gpus, monkeypatch: pytest.MonkeyPatch, value: str, message: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert refused("") == message


@pytest.mark.parametrize("value", ["", "-1", "NoDevFiles"])
def test_l06_no_visible_device_means_the_cpu(four_gpus, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert "--num_gpus=2" in checked("--num_gpus 2")
    assert local.os.environ["DS_ACCELERATOR"] == "cpu"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "--include localhost:7",
            "--include localhost:7: localhost has no device 7: it has device 0 to 3 (this machine)",
        ),
        ("--include w9", "--include w9: 'w9' is not in this machine, which has localhost"),
        ("--include localhost:a", "--include localhost:a: 'localhost:a' is not of the form HOST:0,2 or HOST"),
        ("--exclude localhost", "--exclude localhost leaves no device of this machine"),
        ("--exclude localhost:0,1,2,3", "--exclude localhost:0,1,2,3 leaves no device of this machine"),
        ("--include localhost:1 --exclude localhost:2", "--include and --exclude are both given: keep one"),
        ("--include localhost:1 --num_gpus 1", "--num_gpus and --include both say what to use: keep one"),
        ("--num_gpus 0", "--num_gpus 0: at least 1 is needed"),
        ("--num_nodes 2", "--num_nodes 2 needs --hostfile FILE with as many hosts, before -m"),
        (
            "--launcher slurm",
            "--launcher and --force_multi need --hostfile FILE with the hosts and their slots, before -m",
        ),
        ("--no_ssh", "--no_ssh needs --hostfile FILE with the hosts and their slots, the same on all, before -m"),
        ("--master_port 70000", "--master_port 70000: ports go from 1 to 65535"),
    ],
)  # fmt: skip
def test_l06_selections_that_cannot_be(four_gpus, line: str, message: str) -> None:
    assert refused(line) == message


def test_l06_include_and_visible_devices(four_gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    message = "CUDA_VISIBLE_DEVICES=1 and --include both choose devices, and DeepSpeed would drop the first: keep one"
    assert refused("--include localhost:1") == message


@pytest.mark.skipif(local.gpus() is not None, reason="a machine without GPUs is asked")
def test_l06_without_gpus_the_variable_is_dropped_and_told(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(local, "_other_accelerator", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert "--num_gpus=2" in checked("--num_gpus 2")
    assert "CUDA_VISIBLE_DEVICES" not in local.os.environ
    assert "CUDA_VISIBLE_DEVICES has no effect: the ranks compute on the CPU" in capfd.readouterr().err
    assert refused("--include localhost:7").startswith("--include localhost:7 chooses GPUs, and there is none here")
    assert refused("--num_gpus 9999").startswith("--num_gpus 9999: this machine has no GPU and ")


def test_l10_one_machine_always_gets_a_free_port(listener: int, capfd: pytest.CaptureFixture[str]) -> None:
    ports = [next(word for word in checked("") if word.startswith("--master_port=")) for _ in range(2)]
    assert ports[0] != ports[1], "two jobs started at once"
    assert f"--master_port={listener}" not in checked(f"--master_port {listener}")
    assert f"port {listener} is in use on this machine, so the ranks meet at port " in capfd.readouterr().err


def test_l10_a_free_port_that_was_asked_for_stays() -> None:
    port = local.free_port()
    assert f"--master_port={port}" in checked(f"--master_port {port}")


@needs_pdsh
def test_l10_several_hosts_need_the_port_that_was_agreed(listener: int) -> None:
    path = hostfile("localhost slots=1\nfar.invalid slots=1\n")
    message = refused(f"--hostfile {path} --master_port {listener}", kind=LaunchError)
    assert message == (
        f"port {listener} is in use on this machine, where the ranks would meet: give another one with --master_port, "
        "before -m"
    )


def test_l10_the_port_after_the_module() -> None:
    message = "--master_port is an option of `deepspeed`: put it before -m clap_zero.train"
    assert refused("", "--master_port", "29501") == message


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--num_nodes 3", "--num_nodes 3: hosts has 2 host(s)"),
        ("--num_gpus 3", "--num_gpus 3: hosts:2 gives w1 slots=2"),
        ("--include w1:5", "--include w1:5: w1 has no device 5: it has device 0 to 1 (hosts)"),
        ("--include w3", "--include w3: 'w3' is not in hosts, which has w1, w2"),
        ("--no_ssh", "--no_ssh needs --node_rank, 0 to 1, another one on each host"),
        (
            "--no_ssh --node_rank 1",
            "--no_ssh needs --master_addr, the address of the first host, the same on all hosts",
        ),
        ("--launcher ssh", "--launcher ssh: DeepSpeed has pdsh, openmpi, mpich, impi, mvapich, slurm"),
    ],
)
def test_selections_that_the_hostfile_does_not_have(line: str, message: str) -> None:
    path = hostfile("# two\nw1 slots=2\nw2 slots=4\n")
    assert refused(f"--hostfile {path} {line}") == message


def test_a_hostfile_with_this_machine_alone_needs_no_ssh() -> None:
    line = f"--hostfile {hostfile('localhost slots=2 # both')}"
    argv = checked(line)
    assert {"--no_ssh_check", "--master_addr=127.0.0.1"} <= set(argv)
    assert "--force_multi" not in argv
    clean = next(word for word in argv if word.startswith("--hostfile=")).partition("=")[2]
    assert Path(clean).read_text() == "localhost slots=2\n"


@needs_pdsh
@pytest.mark.parametrize("line", ["", "--num_nodes 1", "--include far.invalid"])
def test_a_hostfile_with_another_machine_alone_does_not_run_here(line: str) -> None:
    """DeepSpeed alone starts the ranks on this machine."""
    text = "far.invalid slots=1\n" if not line else "far.invalid slots=1\nlocalhost slots=1\n"
    message = refused(f"--hostfile {hostfile(text)} {line}", kind=LaunchError)
    assert message.startswith("far.invalid cannot be reached over ssh: ")
    assert message.endswith("; `ssh far.invalid true` has to work without a password")


@needs_pdsh
def test_a_path_that_pdsh_would_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(hostfile("localhost slots=1\n")).absolute()
    (tmp_path / "my checkout").mkdir()
    monkeypatch.chdir(tmp_path / "my checkout")
    assert "DeepSpeed does not quote it for the other hosts" in refused(
        f"--hostfile {path} --force_multi", kind=LaunchError
    )


def test_minus_one_is_deepspeeds_word_for_all(four_gpus) -> None:
    argv = checked("--num_gpus -1 --num_nodes -1")
    assert not [word for word in argv if word.startswith(("--num_gpus", "--num_nodes"))]
    assert refused("--num_gpus -2") == "--num_gpus -2: at least 1 is needed"


@needs_pdsh
def test_words_that_no_module_would_read_back() -> None:
    """One that starts on this machine alone gets them as they are; pdsh would hand them over encoded."""
    line = f"--hostfile {hostfile('far.invalid slots=1')} --no_ssh_check --master_addr x --module clap_zero.cli".split()
    plain, special = (options.read([*line, "eval", word]) for word in ("runs/mine", "my run"))
    assert plain is not None
    assert special is not None
    assert guard.check(plain).arguments == ("eval", "runs/mine")
    with pytest.raises(ConfigError, match="-m clap_zero.cli on several hosts takes no argument with spaces"):
        guard.check(special)
