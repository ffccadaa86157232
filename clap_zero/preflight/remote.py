"""Asking a node over ssh, and saying in one line what stands in the way where it does not answer.

The node's shell sees one constant program with quoted paths; everything else goes through standard input as JSON.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

from clap_zero.preflight.findings import Finding
from clap_zero.preflight.machine import Facts
from clap_zero.preflight.node import PREFIX, Request

CONNECT_S = 10
ANSWER_S = 90.0
"""A node whose disks or driver hang is a finding as well."""
MOST_AT_ONCE = 32

_VERSION = "import platform, sys; print('Python', platform.python_version())"
_SSH_FAILED = 255


@dataclass(frozen=True)
class Way:
    """How the nodes are reached.

    Attributes:
        ssh: Program and options, such as ("ssh", "-F", "file"); what the user's ssh config says holds.
        python: The interpreter to run there.
        directory: Where to run it: the checkout, the same on all nodes.
        python_path: PYTHONPATH there; empty: as the node has it. The launcher hands it on, too.
    """

    ssh: tuple[str, ...]
    python: str
    directory: str
    python_path: str = ""


@dataclass(frozen=True)
class NodeReport:
    """What came of asking a node.

    Attributes:
        host: Its name in the hostfile.
        facts: None where it did not answer.
        findings: What is wrong with it.
        ahead_s: How far its clock is ahead at the least; the answer's way leaves that much doubt.
        answer_s: Seconds until it had answered.
    """

    host: str
    facts: Facts | None
    findings: tuple[Finding, ...]
    ahead_s: float = 0.0
    answer_s: float = 0.0


def ask_nodes(requests: Sequence[tuple[str, Request]], *, way: Way, expected: Facts) -> list[NodeReport]:
    """Asks all nodes at once.

    Args:
        requests: Host and what it shall look at.
        way: How they are reached.
        expected: The facts of this machine, for what is told about a node that cannot answer.
    """
    with ThreadPoolExecutor(max_workers=MOST_AT_ONCE) as pool:
        return list(pool.map(lambda one: _ask(one[0], one[1], way=way, expected=expected), requests))


def _ask(host: str, request: Request, *, way: Way, expected: Facts) -> NodeReport:
    started, clock = time.monotonic(), time.time()
    try:
        done = _ssh(host, [way.python, "-m", "clap_zero.preflight.node"], way=way, text=json.dumps(asdict(request)))
    except subprocess.TimeoutExpired:
        text = f"no answer within {ANSWER_S:.0f} s: a disk or a driver hangs there, or its login shell waits for input"
        return NodeReport(host, None, (Finding("error", text, host),))
    except OSError as error:
        text = f"{shlex.join(way.ssh)} cannot be run here: {error.strerror or error}"
        return NodeReport(host, None, (Finding("error", text, host),))
    returned = time.time()
    lines = [line for line in done.stdout.splitlines() if line.startswith(PREFIX)]
    if done.returncode == 0 and lines:
        try:
            values = json.loads(lines[-1].removeprefix(PREFIX))
            facts = Facts.from_dict(values["facts"])
            found = tuple(Finding(one["level"], one["text"], host) for one in values["findings"])
        except (ValueError, KeyError, TypeError) as error:
            text = f"its answer is not understood ({error!r}): another version of clap_zero runs there"
            return NodeReport(host, None, (Finding("error", text, host),))
        ahead_s = max(0.0, facts.clock - returned) - max(0.0, clock - facts.clock)
        return NodeReport(host, facts, found, ahead_s, time.monotonic() - started)
    text = _why_not(host, done, way=way, expected=expected)
    return NodeReport(host, None, (Finding("error", text, host),))


def _why_not(host: str, done: subprocess.CompletedProcess[str], *, way: Way, expected: Facts) -> str:
    """What stands in the way, what is there and what is expected."""
    said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    last = said[-1] if said else f"it ended with {done.returncode} and gave no reason"
    python = f"Python {expected.python} with clap_zero at {way.python}, as on {expected.host}"
    # A program in place of ssh has codes of its own, and where nothing ran there is no word of it.
    if (done.returncode == _SSH_FAILED or not said) and _is_shut(host, way):
        return f"ssh does not get in: {last}; expected: a login without a password or a question (ssh {host} true)"
    if any("cd:" in line for line in said):
        return f"there is no {way.directory}; expected: the same checkout under the same path on all nodes"
    if done.returncode in (126, 127):
        return f"there is no {way.python} that runs ({last}); expected: {python}"
    there = _python_there(host, way)
    if there is not None and there.split(".")[:2] != f"Python {expected.python}".split(".")[:2]:
        return f"{way.python} is {there}; expected: {python}"
    if "No module named" in last:
        return f"{way.python} ({there or 'version unknown'}) has no clap_zero: {last}; expected: {python}"
    return f"{way.python} -m clap_zero.preflight.node fails with {done.returncode}: {last[:200]}; expected: {python}"


def _is_shut(host: str, way: Way) -> bool:
    """Whether ssh does not get in; it gives the same code for a program that a signal ended there."""
    try:
        return _ssh(host, ["true"], way=way, text="").returncode != 0
    except (OSError, subprocess.TimeoutExpired):
        return True


def _python_there(host: str, way: Way) -> str | None:
    """Such as "Python 3.12.1"; None where it does not even say that."""
    try:
        done = _ssh(host, [way.python, "-c", _VERSION], way=way, text="")
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = [line for line in done.stdout.splitlines() if line.startswith("Python ")]
    return lines[-1] if done.returncode == 0 and lines else None


def _ssh(host: str, words: list[str], *, way: Way, text: str) -> subprocess.CompletedProcess[str]:
    """Runs a program on a node. ssh knows shell lines only, hence the quotes."""
    if way.python_path:
        words = ["env", f"PYTHONPATH={way.python_path}", *words]
    line = f"cd {shlex.quote(way.directory)} && exec {shlex.join(words)}"
    # A connection that stays for later ones would keep our pipes; one that is open already is used all the same.
    options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_S}", "-o", "ControlMaster=no"]
    return subprocess.run(
        [*way.ssh, *options, host, line],
        input=text,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=ANSWER_S,
        check=False,
    )
