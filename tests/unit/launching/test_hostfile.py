"""Hostfiles: what is accepted, and what the user reads for each line that is not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from clap_zero.errors import LaunchError
from clap_zero.launching.hostfile import HostSlots, read_hostfile, written

ROOT = Path(__file__).resolve().parents[3]
NOT_THE_FORM = "is not of the form 'worker-1 slots=8'; nothing was started"


@pytest.fixture
def hostfile(tmp_path: Path) -> Path:
    return tmp_path / "hosts"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"# comment\n\n   \nw1 slots=2   \n", [HostSlots("w1", 2, 4)]),
        (b"w1 slots=2 # gpu\n", [HostSlots("w1", 2, 1)]),
        (b"  w1\tslots=16", [HostSlots("w1", 16, 1)]),
        (b"\xef\xbb\xbfw1 slots=1\r\nw2 slots=3\r\n", [HostSlots("w1", 1, 1), HostSlots("w2", 3, 2)]),
        (b"10.0.0.7 slots=8\nme@node-2.lab slots=8\n", [HostSlots("10.0.0.7", 8, 1), HostSlots("me@node-2.lab", 8, 2)]),
    ],
)
def test_l03_comments_blanks_and_spaces_are_fine(hostfile: Path, content: bytes, expected: list[HostSlots]) -> None:
    hostfile.write_bytes(content)
    assert read_hostfile(hostfile) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("w1 slots=2\nw2 lots=8\n", f":2: 'w2 lots=8' {NOT_THE_FORM}"),
        ("# c\nw2\n", f":2: 'w2' {NOT_THE_FORM}"),
        ("w1 slots=2x", f":1: 'w1 slots=2x' {NOT_THE_FORM}"),
        ("w1 slots = 2", f":1: 'w1 slots = 2' {NOT_THE_FORM}"),
        ("w1 slots=-1", f":1: 'w1 slots=-1' {NOT_THE_FORM}"),
        ("w1 slots=2 max_slots=4", f":1: 'w1 slots=2 max_slots=4' {NOT_THE_FORM}"),
        ("w1 slots=0", ":1: 'w1 slots=0': a host without slots runs nothing: remove the line, or give it slots=1"),
        (
            "w1 slots=2\n\nW1 slots=2 # again",
            ":3: 'W1 slots=2 # again': W1 is there twice, on line 1 too: give it one line with all its slots",
        ),
        (
            "w1:2222 slots=2",
            ":1: 'w1:2222 slots=2': a port does not belong here: set Port for that host in ~/.ssh/config, or give "
            "`deepspeed` --ssh_port",
        ),
        (
            "fe80::1 slots=2",
            ":1: 'fe80::1 slots=2': DeepSpeed reads no IPv6 addresses: name it in ~/.ssh/config or /etc/hosts, and "
            "write the name",
        ),
        (
            "w1 slots=99999999999",
            ":1: 'w1 slots=99999999999': a host has at most 1024 slots, one a GPU; nothing was started",
        ),
        ("w1;reboot slots=2", ":1: 'w1;reboot slots=2': 'w1;reboot' is no name of a host; nothing was started"),
        ("-oProxy=x slots=2", ":1: '-oProxy=x slots=2': '-oProxy=x' is no name of a host; nothing was started"),
    ],
)  # fmt: skip
def test_l03_each_bad_line_is_named(hostfile: Path, text: str, message: str) -> None:
    hostfile.write_text(text)
    with pytest.raises(LaunchError) as caught:
        read_hostfile(hostfile)
    assert str(caught.value) == f"{hostfile}{message}"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no readable hostfile at {}: there is no such file; nothing was started"),
        (b"", "{} names no host: lines look like 'worker-1 slots=8'; nothing was started"),
        (b"# nothing\n\n", "{} names no host: lines look like 'worker-1 slots=8'; nothing was started"),
        (b"\xff\xfe\x00", "no readable hostfile at {}: it is not a text file; nothing was started"),
    ],
)
def test_l01_a_file_without_hosts_starts_nothing(hostfile: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        hostfile.write_bytes(content)
    with pytest.raises(LaunchError) as caught:
        read_hostfile(hostfile)
    assert str(caught.value) == message.format(hostfile)


def test_l01_a_folder_is_no_hostfile(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="it is a folder"):
        read_hostfile(tmp_path)


def test_the_program_says_the_same_and_leaves_a_clean_copy(hostfile: Path) -> None:
    """Without an installation and without torch: any Python of the machine runs it."""
    hostfile.write_text(" w1 slots=2 # gpu\r\nw2   slots=02\n")
    program = [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); "
               "from clap_zero.launching.hostfile import main; code = main(); assert 'torch' not in sys.modules; "
               "sys.exit(code)"]  # fmt: skip
    copy = hostfile.with_name("clean")
    done = subprocess.run([*program, str(hostfile), "--write", str(copy)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"{hostfile}: 2 host(s), 4 slots\n")
    assert copy.read_text() == "w1 slots=2\nw2 slots=2\n" == written(read_hostfile(copy))
    done = subprocess.run([*program, "/nope"], capture_output=True, text=True, check=False)
    assert done.returncode == 5
    assert done.stderr.startswith("clap_zero: error: no readable hostfile at /nope")


def test_the_example_is_one() -> None:
    assert len(read_hostfile(ROOT / "hostfile.example")) == 2
