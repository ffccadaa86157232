"""Rank 0 and other ranks over real connections, each polled by hand in one process."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from clap_zero.distributed.hub_ends import Center, Outpost
from clap_zero.distributed.hub_judge import Verdict
from clap_zero.distributed.hub_station import Settings


class Bed:
    """Rank 0 and the ranks that have called it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.warnings: list[str] = []
        self.center: Center | None = None
        self.outposts: dict[int, Outpost] = {}

    def settings(
        self, rank: int, *, size: int = 3, heartbeat_s: float | None = 30, hang_s: float | None = 600
    ) -> Settings:
        return Settings(rank, size, f"node{rank}", heartbeat_s, hang_s, self.folder / "stacks")

    def start(self, **limits: Any) -> None:
        settings = self.settings(0, **limits)
        self.center = Center(settings, listener=self.listener, token="secret", warn=self.warnings.append)

    def call(self, rank: int, *, token: str = "secret", **limits: Any) -> Outpost:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=5)
        self.outposts[rank] = Outpost(
            self.settings(rank, **limits), connection=connection, token=token, center_host="node0"
        )
        return self.outposts[rank]

    def rounds(self, until: Callable[[], Any] = lambda: None, *, at_most_s: float = 5) -> dict[int, Verdict]:
        """Poll all until something is so; gives the verdicts that came on the way."""
        verdicts: dict[int, Verdict] = {}
        end = time.monotonic() + at_most_s
        while time.monotonic() < end:
            for station in (self.center, *self.outposts.values()):
                verdict = station.poll(0.005) if station is not None else None
                if verdict is not None and station is not None:
                    verdicts.setdefault(station.settings.rank, verdict)
            if until() or (len(verdicts) == 1 + len(self.outposts)):
                break
        return verdicts

    def joined(self) -> bool:
        return self.center is not None and set(self.center.judge.peers) == {0, *self.outposts}

    def close(self) -> None:
        for station in (self.center, *self.outposts.values()):
            if station is not None:
                station.close()
        self.listener.close()
