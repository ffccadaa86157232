"""Learning rate as a pure function of the optimizer step."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up, then half a cosine or a constant.

    Attributes:
        peak: Learning rate at the end of the warm-up.
        minimum: Learning rate at the last step (cosine only).
        warmup_steps: Optimizer steps of the warm-up.
        max_steps: Optimizer steps of the run.
        kind: "cosine" or "constant"; a run of one step has the peak either way.
    """

    peak: float
    minimum: float
    warmup_steps: int
    max_steps: int
    kind: str

    def __call__(self, step: int) -> float:
        """The learning rate used in a step.

        Args:
            step: Optimizer step, 1-based: step `warmup_steps` has the peak, step `max_steps` the minimum.
        """
        if step <= self.warmup_steps:
            return self.peak * step / self.warmup_steps
        if self.kind == "constant" or self.max_steps == 1:  # a cosine that is at its end at once would train nothing
            return self.peak
        done = (step - self.warmup_steps) / max(1, self.max_steps - self.warmup_steps)
        return self.minimum + (self.peak - self.minimum) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
