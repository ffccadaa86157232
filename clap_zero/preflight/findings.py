"""What a check found: an error that nothing may start with, a warning, or something that was put right.

Light: the doctor of a node imports it, and nothing else of weight.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Level = Literal["error", "warning", "told"]


@dataclass(frozen=True)
class Finding:
    """One line for people.

    Attributes:
        level: `error`: nothing may start; `warning`: it may; `told`: it was put right here.
        text: What is there, what is expected, and the way out.
        host: Where it was seen; empty where it is about all.
    """

    level: Level
    text: str
    host: str = ""

    def __str__(self) -> str:
        return f"{self.host}: {self.text}" if self.host else self.text


def errors_of(findings: Iterable[Finding]) -> list[str]:
    """The lines that nothing may start with."""
    return [str(finding) for finding in findings if finding.level == "error"]


def notes_of(findings: Iterable[Finding]) -> list[str]:
    """The other lines, warnings marked as such."""
    return [
        f"warning: {finding}" if finding.level == "warning" else str(finding)
        for finding in findings
        if finding.level != "error"
    ]
