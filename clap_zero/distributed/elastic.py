"""Restarts under torchrun: ranks of one attempt must not read what those of the last one left in the store.

torchrun's agent keeps one store for all attempts (seen with torch 2.14: `_shared_tcp_store_server` is made once, and
`_create_c10d_store` adds no prefix). The addresses of dead ranks are still in it, and the new ones wait for those.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed

_SCHEME = "clap-zero"


def rendezvous_method() -> str | None:
    """What to hand `init_process_group` as its init_method: None where torch's own way is right."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    from torch.distributed.rendezvous import register_rendezvous_handler

    with contextlib.suppress(RuntimeError):  # registered before, by this function
        register_rendezvous_handler(_SCHEME, _own_corner_of_the_store)
    return f"{_SCHEME}://"


def _own_corner_of_the_store(
    url: str, timeout: timedelta = timedelta(minutes=30), **_: Any
) -> Iterator[tuple[torch.distributed.Store, int, int]]:
    """torch's env:// rendezvous, with every key behind a name of this attempt.

    Hosts that come or go start a new attempt under the same count, but with another number of ranks.
    """
    store, rank, size = next(iter(torch.distributed.rendezvous("env://", timeout=timeout)))
    attempt = f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}-of-{size}"
    yield torch.distributed.PrefixStore(attempt, store), rank, size
    raise RuntimeError("a second rendezvous of one process is not possible")
