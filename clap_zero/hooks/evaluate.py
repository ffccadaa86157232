"""Retrieval on the held-out pairs while training."""

from __future__ import annotations

from clap_zero.evaluation.runner import EvalResult, write_result
from clap_zero.training.hooks import Hook
from clap_zero.training.loop import Trainer
from clap_zero.training.step import StepResult
