"""`python -m clap_zero.preflight.node`: what a node answers to the doctor. Reads a request, prints one line of JSON.

The request comes on standard input, one JSON object: nothing of it passes a shell. Light: no torch.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from clap_zero.preflight.findings import Finding
from clap_zero.preflight.gpus import check_gpus, find_gpus
from clap_zero.preflight.machine import check_build_locks, check_limits, check_temporary, facts_here, visible_devices
from clap_zero.preflight.space import (
    check_directory,
    check_shared_memory,
    nearest_directory,
    sees_mark,
)
from clap_zero.preflight.versions import known_bad

PREFIX = "clap_zero-node "
"""Begins the line with the answer: a login script may print what it likes before it."""
CONTACT_S = 5.0


@dataclass(frozen=True)
class Request:
    """What a node shall look at.

    Attributes:
        directory: Where the run's files shall go; a directory that is there on the machine that asks.
        token: What that machine left in it; empty: nothing was left.
        contact: (address, port) at which that machine listens; None: it does not.
        port: Port that has to be free here; 0: none.
        files: Shards and their sizes in bytes, as that machine sees them.
        slots: Ranks that shall run here; 0: not known.
        computes: Whether ranks shall run here at all; on a head node that only starts them GPUs do not matter.
    """

    directory: str
    token: str = ""
    contact: tuple[str, int] | None = None
    port: int = 0
    files: dict[str, int] = field(default_factory=dict)
    slots: int = 0
    computes: bool = True


@dataclass(frozen=True)
class Answer:
    """What a node says.

    Attributes:
        facts: Of the machine.
        findings: What its own checks found.
    """

    facts: dict[str, Any]
    findings: list[Finding]


def examine(request: Request) -> Answer:
    """All checks that a machine can make by itself."""
    gpus, findings = find_gpus(visible_devices())
    facts = facts_here(gpus)
    findings += [*check_gpus(gpus), *_check_slots(request.slots, len(gpus)), *check_limits(), *check_shared_memory()]
    if not request.computes:
        findings = []
    findings += [*known_bad(facts.versions), *check_build_locks()]
    findings += [*_check_run_directory(request), *check_files(request.files)]
    findings += [*check_temporary(), *_check_port(request.port), *_check_contact(request.contact)]
    return Answer(facts.as_dict(), findings)


def check_files(files: dict[str, int]) -> Iterator[Finding]:
    """Whether shards that another machine sees are here, as large, and readable."""
    for path, size in files.items():
        try:
            with Path(path).open("rb") as file:
                file.read(512)
                there = file.seek(0, 2)
        except OSError as error:
            yield Finding("error", f"the shard {path} cannot be read: {error.strerror}; expected: {size} bytes")
            return
        if there != size:
            yield Finding("error", f"the shard {path} has {there} bytes, expected: {size}; the nodes see other data")
            return


def _check_slots(slots: int, num_gpus: int) -> Iterator[Finding]:
    if num_gpus and slots > num_gpus:
        yield Finding("error", f"{num_gpus} GPUs are visible, expected: {slots}, as many as the hostfile has slots")


def _check_run_directory(request: Request) -> Iterator[Finding]:
    directory = Path(request.directory)
    what = "the run directory's place"
    if not directory.is_dir():
        above = nearest_directory(directory)
        yield Finding("error", f"{what} {directory} is not there (only {above}); expected: one disk that all nodes see")
        return
    written = list(check_directory(directory, what=what))
    yield from written
    if request.token and not sees_mark(directory, request.token) and not any(f.level == "error" for f in written):
        yield Finding(
            "error",
            f"{what} {directory} is not shared: a file that was written elsewhere does not show here; expected: one "
            "disk that all nodes see (--run_dir)",
        )


def _check_port(port: int) -> Iterator[Finding]:
    if port:
        try:
            socket.create_server(("", port)).close()
        except OSError as error:
            reason = os.strerror(error.errno or 0)
            text = f"port {port} is taken ({reason}); expected: free, for the ranks to meet (else --master_port)"
            yield Finding("error", text)


def _check_contact(contact: tuple[str, int] | None) -> Iterator[Finding]:
    if contact is not None:
        address, port = contact
        try:
            socket.create_connection((address, port), timeout=CONTACT_S).close()
        except OSError as error:
            yield Finding(
                "error",
                f"{address} port {port} cannot be reached: {error.strerror or error}; expected: open between the nodes "
                "(a firewall, or MASTER_ADDR on another interface)",
            )


def main() -> int:
    """Reads the request, prints the answer."""
    values = json.loads(sys.stdin.read() or "{}")
    contact = values.get("contact")
    request = Request(**{**values, "contact": None if contact is None else (str(contact[0]), int(contact[1]))})
    print(PREFIX + json.dumps(asdict(examine(request))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
