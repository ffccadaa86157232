"""Train CLAP audio-text models with DeepSpeed ZeRO. Importing this imports neither torch nor deepspeed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clap_zero.inference import load

__version__ = "0.1.0"
__all__ = ["__version__", "load"]


def __getattr__(name: str) -> Any:
    """`clap_zero.load` is imported when it is asked for: it needs torch, and starting a loader worker does not."""
    if name == "load":
        from clap_zero.inference import load

        return load
    raise AttributeError(f"module 'clap_zero' has no attribute {name!r}")
