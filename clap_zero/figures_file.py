"""The file that `--json` of a measurement names: looked at before the measurement, written after it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clap_zero.errors import ConfigError


def check_writable(path: Path | None) -> None:
    """Refuses a file that cannot be written, before minutes are spent on what it is for.

    Raises:
        ConfigError: Its directory is not there, it is a directory itself, or may not be written.
    """
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"--json {path}: this is a directory, and a file is needed")
    if not path.parent.is_dir():
        raise ConfigError(f"--json {path}: there is no directory {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"--json {path}: it may not be written by this user")


def write_figures(path: Path | None, figures: Mapping[Any, Any]) -> None:
    """Writes figures as JSON; nothing without a path. Raises ConfigError."""
    if path is None:
        return
    try:
        path.write_text(json.dumps(figures, indent=1) + "\n", "utf-8")
    except OSError as error:
        raise ConfigError(f"--json {path}: {error.strerror or error}") from error
