"""Restarts under torchrun: ranks of one attempt must not read what those of the last one left in the store.

torchrun's agent keeps one store for all attempts (seen with torch 2.14: `_shared_tcp_store_server` is made once, and
`_create_c10d_store` adds no prefix). The addresses of dead ranks are still in it, and the new ones wait for those.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed

_SCHEME = "clap-zero"
_NEWEST = "clap-zero/newest"
_POLL_S = 0.2


def rendezvous_method() -> str | None:
    """What to hand `init_process_group` as its init_method: None where torch's own way is right."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    from torch.distributed.rendezvous import register_rendezvous_handler

    with contextlib.suppress(RuntimeError):  # registered before, by this function
        register_rendezvous_handler(_SCHEME, _own_corner_of_the_store)
    return f"{_SCHEME}://"


def agreed_corner(store: torch.distributed.Store, *, rank: int, size: int, timeout: timedelta) -> str:
    """A name that the ranks of this attempt have in common and those of no other. Collective: all ranks must call.

    torchrun gives none: TORCHELASTIC_RESTART_COUNT counts the failures of one host's agent, and hosts that were not
    at fault, or that came instead of another, have a lower count. So rank 0 thinks of a name, all others call under it,
    and rank 0 answers each call: a name that an earlier attempt left behind answers nobody.

    Raises:
        RuntimeError: A rank did not come in time.
    """
    if rank == 0:
        corner = secrets.token_hex(8)
        store.set(_NEWEST, corner)
        for other in range(1, size):
            call = f"{corner}/call-of-{other}"
            store.wait([call], timeout)
            store.set(f"{corner}/answer-to-{store.get(call).decode()}", "")
        return corner
    own, called, until = secrets.token_hex(8), "", time.monotonic() + timeout.total_seconds()
    store.wait([_NEWEST], timeout)
    while time.monotonic() < until:
        corner = store.get(_NEWEST).decode()
        if corner != called:
            store.set(f"{corner}/call-of-{rank}", own)
            called = corner
        if store.check([f"{corner}/answer-to-{own}"]):
            return corner
        time.sleep(_POLL_S)
    raise RuntimeError(f"rank 0 did not come within {timeout.total_seconds():g} s")


def _own_corner_of_the_store(
    url: str, timeout: timedelta = timedelta(minutes=30), **_: Any
) -> Iterator[tuple[torch.distributed.Store, int, int]]:
    """torch's env:// rendezvous, with every key behind a name of this attempt."""
    store, rank, size = next(iter(torch.distributed.rendezvous("env://", timeout=timeout)))
    corner = agreed_corner(store, rank=rank, size=size, timeout=timeout)
    yield torch.distributed.PrefixStore(corner, store), rank, size
    raise RuntimeError("a second rendezvous of one process is not possible")
