"""Whether stored log-mels are for the kind of model that is to be trained, as far as the splits say it themselves."""

from __future__ import annotations

import json
from pathlib import Path

from clap_zero.data.index import ShardIndex
from clap_zero.data.places import is_remote, local_path
from clap_zero.data.regular import read_text
from clap_zero.errors import ConfigError

_INDEX_FILE = "index.json"


def check_stored_kind(index: ShardIndex, *, truncation: str) -> None:
    """Refuses splits of log-mels for the other kind of model before a model is built; asks index.json of local ones.

    Each sample says it again, so a split without a readable index.json passes.

    Args:
        index: the shards.
        truncation: the kind of model: "rand_trunc" or "fusion".

    Raises:
        ConfigError: a split was packed for the other kind.
    """
    for place in index.places:
        kind = None if is_remote(place.head) else _stored_kind(Path(local_path(place.head)))
        if kind in ("rand_trunc", "fusion") and kind != truncation:
            raise ConfigError(
                f"{place.label} holds log-mels for {kind} models, the model here takes {truncation}: take a {kind} "
                f"model ({'htsat-fused' if kind == 'fusion' else 'htsat-unfused'} is one), pack again with "
                f"--store logmel --truncation {truncation}, or train from audio"
            )


def _stored_kind(directory: Path) -> object:
    """What index.json says about log-mels; None where it says nothing."""
    try:
        content = json.loads(read_text(directory / _INDEX_FILE))
    except (OSError, ValueError, RecursionError):
        return None
    return content.get("truncation") if isinstance(content, dict) and content.get("store") == "logmel" else None
