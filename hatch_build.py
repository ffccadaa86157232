"""Build hook: files that a wheel holds although they do not live in the package directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PTH = "clap_zero_deepspeed_m.pth"


class OutsideFiles(BuildHookInterface):
    """Puts the .pth beside the package in site-packages, and the embedded sounds into the package."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Fires once per wheel; `version` is "editable" or "standard".

        An editable install finds the sounds in the checkout, so a second copy, which would grow stale, stays out.
        """
        pth = str(Path(self.root) / "packaging" / PTH)
        if version == "editable":
            build_data["force_include_editable"][pth] = PTH
            return
        build_data["force_include"][pth] = PTH
        build_data["force_include"][str(Path(self.root) / "examples" / "sounds")] = "clap_zero/assets/sounds"
