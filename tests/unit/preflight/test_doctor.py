"""What the doctor of several hosts asks of whom, and that its ranks end."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from clap_zero import cli
from clap_zero.errors import LaunchError
from clap_zero.launching.hostfile import HostSlots
from clap_zero.launching.hosts import address_towards, free_port
from clap_zero.preflight import start
from clap_zero.preflight.doctor import contact_address


def test_hosts_call_this_machine_only_where_the_ranks_meet_on_it() -> None:
    here, far = HostSlots("localhost", 8, 1), HostSlots("192.0.2.1", 8, 2)
    assert contact_address([far, here], "192.0.2.1", master_addr="") is None
    assert contact_address([far, here], "192.0.2.1", master_addr="192.0.2.1") is None
    assert contact_address([here, far], "192.0.2.1", master_addr="10.0.0.1") == "10.0.0.1"
    assert contact_address([here, far], "192.0.2.1", master_addr="") == address_towards("192.0.2.1")
    assert contact_address([here, far], "localhost", master_addr="") is None


def test_ranks_that_do_not_end_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    monkeypatch.setattr(start, "RANKS_WAIT_S", 0.5)
    with pytest.raises(LaunchError, match="did not end within"):
        start.start_ranks(["sh", "-c", "sleep 60 & echo $!; wait"], dict(os.environ))
    child = Path("/proc") / capfd.readouterr().out.splitlines()[-1]
    deadline = time.monotonic() + 5
    while child.exists() and "Z" not in (child / "stat").read_text().split()[2] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not child.exists() or (child / "stat").read_text().split()[2] == "Z"


def test_a_hostfile_with_this_machine_alone_needs_no_ssh(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    words = ["doctor", "--hostfile", str(tmp_path / "hosts"), "--ranks", "0", "--ssh", "/nowhere/ssh"]
    code = cli.main([*words, "--master_port", str(free_port())])
    assert code == 0, capsys.readouterr().err


def test_ssh_that_fails_without_a_word_is_not_blamed_on_python(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hosts").write_text("far.invalid slots=2\n")
    words = ["doctor", "--hostfile", str(tmp_path / "hosts"), "--ranks", "0", "--ssh", "false"]
    assert cli.main([*words, "--master_port", str(free_port())]) == 5
    assert "far.invalid: ssh does not get in: it ended with 1 and gave no reason" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "flags", "part"),
    [
        (None, [], "cannot be read: No such file"),
        ("{broken", [], "broken JSON"),
        ('{"gradient_clipp1ng": 1.0}', [], "did you mean gradient_clipping?"),
        ("{}", ["--ds.zero_optimization.stge", "1"], "did you mean zero_optimization.stage?"),
    ],
)
def test_a_deepspeed_json_that_is_wrong_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, flags: list[str], part: str
) -> None:
    path = tmp_path / "ds.json"
    if text is not None:
        path.write_text(text)
    assert cli.main(["doctor", "--ranks", "0", "--ds_config", str(path), *flags]) == 2
    assert part in capsys.readouterr().err


def test_data_that_are_not_there_have_the_code_of_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ds.json").write_text("{}")
    words = ["doctor", "--ranks", "0", "--ds_config", str(tmp_path / "ds.json"), "--data.train", str(tmp_path / "no")]
    assert cli.main(words) == 3
    assert "/no is not there" in capsys.readouterr().err
