"""Where shards lie, and what is read of remote places before training starts."""

from __future__ import annotations

from clap_zero.data.places import ReadPolicy, is_pipe, is_remote, join, local_path, shown

__all__ = ["ReadPolicy", "is_pipe", "is_remote", "join", "local_path", "shown"]
