"""The largest of several errors, for comparisons that must not pass because something is not a number."""

from __future__ import annotations

from collections.abc import Mapping

import torch


def worst(errors: Mapping[str, float]) -> tuple[float, str]:
    """The largest error and whose it is; NaN is larger than any number (Python's max drops one that is not first)."""
    values = torch.tensor(list(errors.values()), dtype=torch.float64)
    place = int(values.argmax())
    return float(values[place]), list(errors)[place]
