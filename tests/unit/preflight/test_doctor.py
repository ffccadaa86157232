"""What the doctor of several hosts asks of whom, and that its ranks end."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from clap_zero.errors import LaunchError
from clap_zero.launching.hostfile import HostSlots
from clap_zero.launching.hosts import address_towards
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
