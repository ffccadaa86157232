"""What all ranks have to see alike: one run directory, the same shards."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from clap_zero.data.index import ShardIndex
from clap_zero.data.patterns import spread
from clap_zero.data.places import is_remote
from clap_zero.data.sizes import SIZES_FILE
from clap_zero.distributed import collectives
from clap_zero.distributed.world import World
from clap_zero.errors import ClapZeroError, DataError, LaunchError
from clap_zero.preflight.findings import Finding, errors_of, notes_of
from clap_zero.preflight.node import check_files
from clap_zero.preflight.space import check_directory, leave_mark, sees_mark

SAMPLED = 8
"""Shards of a setting, and directories, that every rank looks at."""
SEES_WITHIN_S = 3.0
"""How long a file of another node may take to show on a network file system."""


def rank_name(world: World) -> str:
    """What to call this rank in a message: `rank 3 on node7`."""
    return f"rank {world.rank} on {socket.gethostname()}"


def check_shared_directory(directory: Path, *, world: World) -> list[str]:
    """Whether every rank can write the run directory, and sees there what rank 0 wrote.

    Collective: all ranks must call, when rank 0 has made the directory.

    Returns:
        Warnings.

    Raises:
        LaunchError: A rank sees another directory, or cannot write it. On all ranks; rank 0 reports it.
    """
    mark, token, fault = None, secrets.token_hex(8), ""
    if world.is_main:
        try:
            mark = leave_mark(directory, token)
        except OSError as error:
            fault = f"the run directory {directory} cannot be written: {error.strerror or error}"
    token, fault = collectives.broadcast_object((token, fault))
    try:
        findings = [Finding("error", fault)] if fault else _check_directory(directory, token, is_main=world.is_main)
        # Only rank 0's own fault, when it has one: the others could not look.
        own = [] if fault and not world.is_main else findings
        answers = collectives.all_gather_objects([Finding(one.level, one.text, rank_name(world)) for one in own])
    finally:
        if mark is not None:
            mark.unlink(missing_ok=True)
    every = [one for found in answers for one in found]
    raise_together(errors_of(every), world)
    return notes_of(every)


def check_data(indices: Iterable[ShardIndex | None], *, world: World) -> None:
    """Whether every rank reads the shards that rank 0 found: a few of each setting, by name, size and access.

    Shards at remote places are left out: reading them says by itself what is wrong.

    Collective: all ranks must call.

    Raises:
        DataError: A rank sees other shards. On all ranks; rank 0 reports it.
    """
    files: dict[str, int] = {}
    if world.is_main:
        for index in indices:
            files.update({} if index is None else sampled_files(index))
    files = collectives.broadcast_object(files)
    findings = [] if world.is_main else list(check_files(files))
    answers = collectives.all_gather_objects((rank_name(world), findings))
    lines = [f"{who}: {one.text} as on {answers[0][0]}" for who, found in answers for one in found]
    raise_together(lines, world, kind=DataError)


def sampled_files(index: ShardIndex) -> dict[str, int]:
    """A few local shards, spread over the index, and the counts of a few directories, with their sizes in bytes."""
    paths = [index.path(number) for number in spread(range(index.num_shards), SAMPLED)]
    paths += [f"{place.head}{SIZES_FILE}" for place in index.places[:SAMPLED]]
    # One that is not there was passed over knowingly (data.missing_shards skip), or has no counts.
    return {path: Path(path).stat().st_size for path in paths if not is_remote(path) and Path(path).is_file()}


def raise_together(lines: Sequence[str], world: World, *, kind: type[ClapZeroError] = LaunchError) -> None:
    """Raises the same error on all ranks, if there is one. All ranks have to give the same lines."""
    if lines:
        error = kind("\n".join(dict.fromkeys(lines)))
        error.reported_elsewhere = not world.is_main
        raise error


def _check_directory(directory: Path, token: str, *, is_main: bool) -> list[Finding]:
    deadline = time.monotonic() + SEES_WITHIN_S
    # A directory that was looked for before it was made may be missing for a while on a network file system.
    if not _comes(lambda: _is_listed(directory), deadline):
        return [_not_shared(directory)]
    found = list(check_directory(directory, what="the run directory", warn=is_main))
    if any(finding.level == "error" for finding in found) or _comes(lambda: sees_mark(directory, token), deadline):
        return found
    return [*found, _not_shared(directory)]


def _comes(condition: Callable[[], bool], deadline: float) -> bool:
    """Waits until it holds, or the deadline (of the monotonic clock, in seconds) has passed."""
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _is_listed(directory: Path) -> bool:
    """Whether it is there. Listing what is above refreshes what a network file system knows."""
    if directory.is_dir():
        return True
    with contextlib.suppress(OSError):
        os.listdir(directory.parent)  # noqa: PTH208
    return directory.is_dir()


def _not_shared(directory: Path) -> Finding:
    return Finding(
        "error",
        f"the run directory {directory} is not shared: what rank 0 wrote there does not show here; expected: one disk "
        "that all nodes see (--run_dir), or checkpoints would be torn apart",
    )
