"""Every field of every request has a bound, so that no request costs more than was thought of."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import annotated_types as at
import pytest
from pydantic import AfterValidator, BaseModel, Field
from pydantic.fields import FieldInfo

from rillflow_parts.endpoint.openai_protocol import ChatRequest, CompletionRequest
from rillflow_parts.endpoint.responses import ResponsesRequest

_PLAIN = (bool, type(None))


def unbounded(kind: Any, place: str, metadata: Sequence[Any] = ()) -> Iterator[str]:
    """Yield the places in a type that have no bound."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        yield from unbounded(args[0], place, [*flat(args[1:]), *metadata])
    elif origin in (Union, types.UnionType):
        for each in args:
            yield from unbounded(each, place, metadata)
    elif origin is Literal or kind in _PLAIN:
        return
    elif isinstance(kind, type) and issubclass(kind, BaseModel):
        yield from unbounded_in(kind, place)
    elif dataclasses.is_dataclass(kind):
        for name, each in get_type_hints(kind, include_extras=True).items():
            yield from unbounded(each, f"{place}.{name}")
    elif kind is Any:
        if not any(isinstance(each, AfterValidator) for each in metadata):
            yield f"{place}: any value"
    elif kind in (int, float):
        is_low = any(isinstance(each, at.Ge | at.Gt) for each in metadata)
        is_high = any(isinstance(each, at.Le | at.Lt) for each in metadata)
        if not (is_low and is_high):
            yield f"{place}: {kind.__name__}"
    elif kind is str:
        if not any(isinstance(each, at.MaxLen) for each in metadata) and "pattern" not in str(metadata):
            yield f"{place}: text"
    elif origin in (list, tuple, dict, Sequence, Mapping):
        is_whole = any(isinstance(each, AfterValidator) for each in metadata)
        if not any(isinstance(each, at.MaxLen) for each in metadata):
            yield f"{place}: {origin.__name__}"
        if origin is list and "fail_fast" not in str(metadata) and "FailFast" not in str(metadata):
            yield f"{place}: a list that does not stop at its first error"
        for each in args:
            if each is not Ellipsis and not is_whole:
                yield from unbounded(each, f"{place}[]")
    else:
        yield f"{place}: {kind}"


def flat(metadata: Sequence[Any]) -> list[Any]:
    """Return metadata with the parts of ``Field(...)`` beside it."""
    parts = [each.metadata if isinstance(each, FieldInfo) else [each] for each in metadata]
    return [each for part in parts for each in part]


def unbounded_in(model: type[BaseModel], place: str = "") -> Iterator[str]:
    """Yield the fields of a model, and of those inside it, that have no bound."""
    place = place or model.__name__
    for name, field in model.model_fields.items():
        yield from unbounded(field.annotation, f"{place}.{name}", flat(field.metadata))


@pytest.mark.parametrize("model", [ChatRequest, CompletionRequest, ResponsesRequest])
def test_every_field_of_the_door_has_a_bound(model: type[BaseModel]) -> None:
    assert [*unbounded_in(model)] == []


def test_a_field_without_a_bound_is_seen() -> None:
    class Inner(BaseModel):
        count: int
        share: float = Field(ge=0)

    class Outer(BaseModel):
        inner: Inner
        texts: list[str] = Field(max_length=3)
        names: Annotated[list[Annotated[str, Field(max_length=2)]], Field(max_length=3, fail_fast=True)]
        free: dict[str, Any] | None = None
        fine: Annotated[int, Field(ge=0, lt=4)] | Literal["a"] | bool | None = None

    assert [*unbounded_in(Outer)] == [
        "Outer.inner.count: int",
        "Outer.inner.share: float",
        "Outer.texts: a list that does not stop at its first error",
        "Outer.texts[]: text",
        "Outer.free: dict",
        "Outer.free[]: text",
        "Outer.free[]: any value",
    ]
