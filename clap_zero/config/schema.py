"""The run config: everything about a run that the DeepSpeed JSON does not own.

One frozen section per concern, closed to unknown keys. `load.py` fills it from preset, file and flags; nothing else
constructs it in production. Light at import: loader workers import this module.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, model_validator
from pydantic.fields import FieldInfo

from clap_zero.config.data import DataSection
from clap_zero.config.objective import ObjectiveSection
from clap_zero.config.section import MOST, MOST_S, Auto, PositiveInt, Section, Text, accepts, key

__all__ = ["PRESETS", "RunConfig", "Section", "accepts", "iter_keys"]

PRESETS = ("tiny", "tiny-fused", "htsat-unfused", "htsat-fused", "large")

BatchSize = PositiveInt | Auto
MOST_RATE = 1e6
"""Largest learning rate and decay: far above what trains, far below what fp32 holds."""


class ModelSection(Section):
    """Which CLAP model is trained, and from what it starts."""

    preset: Literal["tiny", "tiny-fused", "htsat-unfused", "htsat-fused", "large"] | None = key(
        None, "geometry to train from scratch; excludes model.pretrained", "-"
    )
    pretrained: Text | None = key(
        None, "directory or hub name of a Hugging Face ClapModel to start from; excludes model.preset", "-"
    )
    batch_norm: Literal["sync", "local", "frozen"] = key(
        "sync",
        "statistics of BatchNorm: one micro batch over all ranks (sync), a rank's own (local), running (frozen)",
        "-",
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] | None = key(
        None, "sets every dropout, attention dropout and drop path of both towers; null keeps the model's own", "rate"
    )


class TrainSection(Section):
    """Length, batch and learning rate."""

    max_steps: PositiveInt | None = key(None, "length of training; excludes train.epochs", "optimizer steps")
    epochs: Annotated[float, Field(gt=0, le=1e6)] | None = key(
        None, "length of training; excludes train.max_steps", "passes over the data"
    )
    global_batch_size: BatchSize = key(
        "auto", "pairs per optimizer step, over all ranks and accumulation; auto: as the preset says", "pairs"
    )
    micro_batch_size: BatchSize = key(
        "auto", "pairs per forward and rank; auto: what the data and the smallest memory allow", "pairs"
    )
    learning_rate: float = key(1e-5, "peak learning rate", "1/step", gt=0, le=MOST_RATE)
    weight_decay: float = key(
        0.0, "decoupled decay of matrices; biases, norms and scales have none", "1/step", ge=0, le=MOST_RATE
    )
    warmup_steps: int = key(500, "linear rise from 0 to the peak", "optimizer steps", ge=0, le=MOST)
    min_learning_rate: float = key(0.0, "where the cosine ends", "1/step", ge=0)
    schedule: Literal["cosine", "constant"] = key("cosine", "after the warm-up, when the JSON has no scheduler", "-")
    seed: int = key(0, "of weights, order, crops, captions and dropout", "-", ge=0, lt=2**32)

    @model_validator(mode="after")
    def _check(self) -> TrainSection:
        if self.max_steps is not None and self.epochs is not None:
            raise ValueError(
                f"train.max_steps {self.max_steps} and train.epochs {self.epochs:g} are both given: "
                "keep one, and set the other to null (--train.epochs null or --train.max_steps null)"
            )
        if self.min_learning_rate > self.learning_rate:
            raise ValueError(
                f"train.min_learning_rate {self.min_learning_rate:g} is above train.learning_rate "
                f"{self.learning_rate:g}: lower --train.min_learning_rate or raise --train.learning_rate"
            )
        micro, whole = self.micro_batch_size, self.global_batch_size
        if isinstance(micro, int) and isinstance(whole, int) and whole % micro:
            raise ValueError(
                f"train.global_batch_size {whole} is not a multiple of train.micro_batch_size {micro}: "
                "change one, or set --train.micro_batch_size auto"
            )
        return self


class EvaluateSection(Section):
    """Retrieval on the held-out pairs."""

    every_steps: PositiveInt | None = key(
        None, "evaluate each so many steps; null: at step 0 and at the end only", "optimizer steps"
    )
    batch_size: int = key(16, "clips or captions per forward and rank", "count", gt=0, le=MOST)


class CheckpointSection(Section):
    """When the state is saved."""

    every_steps: int = key(500, "save each so many steps, and at the end", "optimizer steps", gt=0, le=MOST)
    keep: int = key(2, "newest complete checkpoints that stay", "count", gt=0, le=MOST)


class LogSection(Section):
    """How often a step is shown."""

    every_steps: int = key(1, "steps between two lines on the console", "optimizer steps", gt=0, le=MOST)


class WandbSection(Section):
    """Weights & Biases; never stops training."""

    mode: Literal["auto", "online", "offline", "disabled"] = key(
        "auto", "auto: WANDB_MODE where set, else online with a key and offline without", "-"
    )
    project: Text = key("clap_zero", "project that the run appears in", "-")
    name: str | None = key(None, "display name of the run; null: the run directory's name", "-")
    entity: str | None = key(None, "team or user; null: the key's default", "-")


class DistributedSection(Section):
    """Ranks and how long they wait for each other."""

    timeout_s: float = key(1800.0, "longest wait in a collective before the run is given up", "s", gt=0, le=MOST_S)
    start_timeout_s: float = key(
        300.0, "longest wait for all ranks to come together at the start", "s", gt=0, le=MOST_S
    )
    heartbeat_timeout_s: Annotated[float, Field(gt=0, le=MOST_S)] | None = key(
        30.0, "a rank that says nothing for so long is gone, and the run ends; null: never", "s"
    )
    hang_timeout_s: Annotated[float, Field(gt=0, le=MOST_S)] | None = key(
        600.0, "all ranks without progress for so long: stacks are written and the run ends; null: never", "s"
    )


class RunConfig(Section):
    """A whole run. Precedence: schema default < preset's `run:` < --config file < flags."""

    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    objective: ObjectiveSection = ObjectiveSection()
    train: TrainSection = TrainSection()
    evaluate: EvaluateSection = EvaluateSection()
    checkpoint: CheckpointSection = CheckpointSection()
    log: LogSection = LogSection()
    wandb: WandbSection = WandbSection()
    distributed: DistributedSection = DistributedSection()
    run_dir: Text | None = key(
        None, "directory of the run; null: runs/{preset or pretrained}-{DeepSpeed JSON's name}", "-"
    )
    ds_config: Text = key(..., "DeepSpeed JSON; comments and trailing commas allowed", "-")
    resume: Text = key("auto", "auto: continue the run in run_dir; never: refuse to; or a checkpoint's path", "-")
    force: bool = key(False, "go on in a run directory although its config has changed", "-")

    @model_validator(mode="after")
    def _check(self) -> RunConfig:
        if self.model.preset is not None and self.model.pretrained is not None:
            raise ValueError(
                f"model.preset {self.model.preset} and model.pretrained {self.model.pretrained} are both given: keep "
                "one, and set the other to null (--model.preset null or --model.pretrained null)"
            )
        if self.model.preset is None and self.model.pretrained is None:
            raise ValueError("no model is named: give --model.preset NAME or --model.pretrained DIR")
        if self.train.max_steps is None and self.train.epochs is None:
            raise ValueError("the length of training is not set: give --train.max_steps N or --train.epochs N")
        if self.resume in ("latest", "last", "best", "true") or self.resume.isdecimal():
            raise ValueError(
                f"resume {self.resume} names no checkpoint: auto (the default) goes on with the newest one of run_dir; "
                "to start from another run, give the path of its directory or of a checkpoint in it"
            )
        return self


def iter_keys(section: type[Section] = RunConfig, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every leaf of the run config as (dotted key, field), sections in their written order, top-level keys last."""
    leaves = []
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            yield from iter_keys(kind, f"{prefix}{name}.")
        else:
            leaves.append((f"{prefix}{name}", field))
    yield from leaves
