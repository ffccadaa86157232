"""What every section of the run config is made of: its base class, how a key is declared, which kinds it takes."""

from __future__ import annotations

from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

Auto = Literal["auto"]
MOST = 10**12
"""Largest count: what is above it is a slip, and does not fit what counts steps and pairs."""
MOST_S = 1e6
"""Longest wait, eleven days: the clocks of sockets and of torch end there or soon after."""
PositiveInt = Annotated[int, Field(gt=0, le=MOST)]
Text = Annotated[str, Field(min_length=1)]


def key(default: Any, description: str, unit: str, **constraints: Any) -> Any:
    """A field whose help line ends with its unit, "-" for keys without one."""
    return Field(default, description=description, json_schema_extra={"unit": unit}, **constraints)


class Section(BaseModel):
    """Base of every section: immutable, closed, no infinities, and no true/false where a number is meant.

    Where `off` is among a key's words, false is it: that is what tools that read YAML 1.1 make of it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_booleans_as_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        field = cls.model_fields[str(info.field_name)]
        if not isinstance(value, bool) or accepts(field, bool):
            return value
        words = choices(field)
        if value is False and "off" in words:
            return "off"
        if accepts(field, int) or accepts(field, float):
            number = "a whole number" if not accepts(field, float) else "a number"
            raise ValueError(" or ".join([f"{number} is needed", *words]))
        return value  # the kinds that are left take no truth value by themselves


def choices(field: FieldInfo) -> list[str]:
    """The fixed words that a key takes."""
    parts = (field.annotation, *get_args(field.annotation))
    return [str(choice) for part in parts if get_origin(part) is Literal for choice in get_args(part)]


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
