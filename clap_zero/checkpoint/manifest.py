"""The manifest of a checkpoint: every file with size and checksum, written last, so that a bad one can be told."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clap_zero.checkpoint.files import checksum_file
from clap_zero.errors import CheckpointError

MANIFEST = "manifest.json"
MANIFEST_FORMAT = 1
KEYS = {"step", "sequence", "files"}


@dataclass(frozen=True)
class Rejected:
    """A checkpoint that cannot be used.

    Attributes:
        path: The directory or pointer file.
        reason: What is wrong with it, in words.
    """

    path: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


def read_manifest(path: Path) -> dict[str, Any]:
    """Reads a checkpoint's manifest.

    Raises:
        CheckpointError: There is none, or it is not one of ours.
    """
    file = Path(path) / MANIFEST
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no {MANIFEST}, so the save was not finished") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot be read ({error})") from error
    if not isinstance(manifest, dict) or manifest.get("format") != MANIFEST_FORMAT or not manifest.keys() >= KEYS:
        raise CheckpointError(f"{file}: not a manifest of format {MANIFEST_FORMAT}")
    return manifest


def find_fault(path: Path, *, checksums: bool = True, share: tuple[int, int] = (0, 1)) -> str | None:
    """Compares a checkpoint with its manifest.

    Args:
        path: The checkpoint's directory.
        checksums: Also read every file and compare CRC-32; sizes alone find what is missing, empty or cut.
        share: (rank, world size): checksums of every world-th file only, so that ranks can share the reading.

    Returns:
        None for a good one, else what is wrong with the first bad file.
    """
    try:
        files = read_manifest(path)["files"]
    except CheckpointError as error:
        return str(error).removeprefix(f"{path}: ")
    for number, (name, record) in enumerate(sorted(files.items())):
        file = Path(path) / name
        try:
            size = file.stat().st_size
            if size != record["size_bytes"]:
                return f"{name} has {size} bytes instead of {record['size_bytes']}"
            if checksums and number % share[1] == share[0] and checksum_file(file).crc32 != record["crc32"]:
                return f"{name} has the right size but another checksum than when it was written"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read ({error})"
    return None
