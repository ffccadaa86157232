"""What every section of the run config is made of: its base class, how a key is declared, which kinds it takes."""

from __future__ import annotations

from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

Auto = Literal["auto"]
PositiveInt = Annotated[int, Field(gt=0)]
Text = Annotated[str, Field(min_length=1)]


def key(default: Any, description: str, unit: str, **constraints: Any) -> Any:
    """A field whose help line ends with its unit, "-" for keys without one."""
    return Field(default, description=description, json_schema_extra={"unit": unit}, **constraints)


class Section(BaseModel):
    """Base of every section: immutable, closed, no infinities, and no true/false where a number is meant."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _no_booleans_as_numbers(cls, values: Any) -> Any:
        """pydantic takes true for 1; as a text it is refused like any other that is not a value of the key."""
        if not isinstance(values, dict):
            return values
        return {name: _as_text(value, cls.model_fields.get(name)) for name, value in values.items()}


def _as_text(value: Any, field: FieldInfo | None) -> Any:
    takes_others = field is None or accepts(field, bool) or accepts(field, str)
    return value if takes_others or not isinstance(value, bool) else str(value).lower()


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
