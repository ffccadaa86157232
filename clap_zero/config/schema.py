"""The run config: everything about a run that the DeepSpeed JSON does not own.

One frozen section per concern, closed to unknown keys. `load.py` fills it from preset, file and flags; nothing else
constructs it in production. Light at import: loader workers import this module.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic.fields import FieldInfo

PRESETS = ("tiny", "tiny-fused", "htsat-unfused", "htsat-fused", "large")

Auto = Literal["auto"]
PositiveInt = Annotated[int, Field(gt=0)]
BatchSize = PositiveInt | Auto
Text = Annotated[str, Field(min_length=1)]


def _key(default: Any, description: str, unit: str, **constraints: Any) -> Any:
    """A field whose help line ends with its unit, "-" for keys without one."""
    return Field(default, description=description, json_schema_extra={"unit": unit}, **constraints)


class Section(BaseModel):
    """Base of every section: immutable, closed, no infinities, and no true/false where a number is meant."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _no_booleans_as_numbers(cls, values: Any) -> Any:
        if isinstance(values, dict):
            for name, value in values.items():
                field = cls.model_fields.get(name)
                if field is not None and isinstance(value, bool) and not accepts(field, bool):
                    raise ValueError(f"{name}: {str(value).lower()} is not a value of this key")
        return values


class ModelSection(Section):
    """Which CLAP model is trained, and from what it starts."""

    preset: Literal["tiny", "tiny-fused", "htsat-unfused", "htsat-fused", "large"] | None = _key(
        None, "geometry to train from scratch; excludes model.pretrained", "-"
    )
    pretrained: Text | None = _key(
        None, "directory or hub name of a Hugging Face ClapModel to start from; excludes model.preset", "-"
    )
    batch_norm: Literal["sync", "local", "frozen"] = _key(
        "sync",
        "statistics of BatchNorm: one micro batch over all ranks (sync), a rank's own (local), running (frozen)",
        "-",
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] | None = _key(
        None, "sets every dropout, attention dropout and drop path of both towers; null keeps the model's own", "rate"
    )


class DataSection(Section):
    """Where the pairs are and how they are read."""

    train: tuple[Text, ...] = _key((), "training shards: directory, tar file or brace pattern; repeat for more", "-")
    val: tuple[Text, ...] = _key((), "held-out shards, never trained on; repeat for more", "-")
    workers: Annotated[int, Field(ge=0)] | Auto = _key("auto", "loader processes a rank; 0 reads in the rank", "count")
    log_keys: Text | None = _key(None, "directory for the sample keys that each rank trained on, a line a step", "-")
    truncation: Literal["auto", "rand_trunc", "fusion"] = _key(
        "auto", "clips above 10 s: one crop (rand_trunc) or four views (fusion); auto: as the model does", "-"
    )
    max_caption_tokens: int = _key(77, "longer captions are cut, special tokens counted", "tokens", ge=4, le=512)
    max_seconds: float = _key(60.0, "longest part of a clip that is decoded", "s", ge=1, le=3600)
    shuffle_shards: int = _key(16, "shards whose samples are mixed with each other", "shards", gt=0)
    caption_key: Text = _key("text", "member of the sample's JSON that holds its caption or list of captions", "-")
    max_bad_fraction: float = _key(
        0.05, "stop when more than this share of an epoch (and of a few at least) is unusable", "share", ge=0, le=1
    )

    @field_validator("train", "val", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value


class TrainSection(Section):
    """Length, batch and learning rate."""

    max_steps: PositiveInt | None = _key(None, "length of training; excludes train.epochs", "optimizer steps")
    epochs: Annotated[float, Field(gt=0)] | None = _key(
        None, "length of training; excludes train.max_steps", "passes over the data"
    )
    global_batch_size: BatchSize = _key(
        "auto", "pairs per optimizer step, over all ranks and accumulation; auto: as the preset says", "pairs"
    )
    micro_batch_size: BatchSize = _key(
        "auto", "pairs per forward and rank; auto: what the data and the smallest memory allow", "pairs"
    )
    learning_rate: float = _key(1e-5, "peak learning rate", "1/step", gt=0)
    weight_decay: float = _key(0.0, "decoupled decay of matrices; biases, norms and scales have none", "1/step", ge=0)
    warmup_steps: int = _key(500, "linear rise from 0 to the peak", "optimizer steps", ge=0)
    min_learning_rate: float = _key(0.0, "where the cosine ends", "1/step", ge=0)
    schedule: Literal["cosine", "constant"] = _key("cosine", "after the warm-up, when the JSON has no scheduler", "-")
    seed: int = _key(0, "of weights, order, crops, captions and dropout", "-", ge=0, lt=2**32)

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

    every_steps: PositiveInt | None = _key(
        None, "evaluate each so many steps; null: at step 0 and at the end only", "optimizer steps"
    )
    batch_size: int = _key(16, "clips or captions per forward and rank", "count", gt=0)


class CheckpointSection(Section):
    """When the state is saved."""

    every_steps: int = _key(500, "save each so many steps, and at the end", "optimizer steps", gt=0)
    keep: int = _key(2, "newest complete checkpoints that stay", "count", gt=0)


class LogSection(Section):
    """How often a step is shown."""

    every_steps: int = _key(1, "steps between two lines on the console", "optimizer steps", gt=0)


class WandbSection(Section):
    """Weights & Biases; never stops training."""

    mode: Literal["auto", "online", "offline", "disabled"] = _key(
        "auto", "auto: WANDB_MODE where set, else online with a key and offline without", "-"
    )
    project: Text = _key("clap_zero", "project that the run appears in", "-")
    name: str | None = _key(None, "display name of the run; null: the run directory's name", "-")
    entity: str | None = _key(None, "team or user; null: the key's default", "-")


class DistributedSection(Section):
    """Ranks and how long they wait for each other."""

    timeout_s: float = _key(1800.0, "longest wait in a collective before the run is given up", "s", gt=0)


class RunConfig(Section):
    """A whole run. Precedence: schema default < preset's `run:` < --config file < flags."""

    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    evaluate: EvaluateSection = EvaluateSection()
    checkpoint: CheckpointSection = CheckpointSection()
    log: LogSection = LogSection()
    wandb: WandbSection = WandbSection()
    distributed: DistributedSection = DistributedSection()
    run_dir: Text | None = _key(
        None, "directory of the run; null: runs/{preset or pretrained}-{DeepSpeed JSON's name}", "-"
    )
    ds_config: Text = _key(..., "DeepSpeed JSON; comments and trailing commas allowed", "-")
    resume: Text = _key("auto", "auto: continue the run in run_dir; never: refuse to; or a checkpoint's path", "-")
    force: bool = _key(False, "go on in a run directory although its config has changed", "-")

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
        return self


def accepts(field: FieldInfo, kind: type) -> bool:
    """Whether a value of exactly this type is among what the field's annotation names, None included."""
    return kind in set(_kinds(field.annotation))


def _kinds(annotation: Any) -> Iterator[type]:
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _kinds(get_args(annotation)[0])
    elif origin in (Union, UnionType):
        for part in get_args(annotation):
            yield from _kinds(part)
    elif origin is Literal:
        yield Literal  # type: ignore[misc]
    elif isinstance(annotation, type):
        yield annotation
    elif origin is not None:
        yield origin


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
