"""Ray messages: serialised values for Ray, and their sizes.

    value ── packed ──> small   bytes, which Ray sends inside the call or its reply
                        large   [bytes, arrays]: arrays are in the object store, and a reader on the
                                same machine maps them without a copy

References inside a value are replaced by names and travel next to the value, so that Ray can track who holds
them. This applies to a call, to a table of references, and to a batch whose large fields are separate
objects, so that a rank fetches only the fields that it reads.
Imported by ``workers.ray``, which first configures Ray's authentication.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray

from rillflow.records.batch import Batch, Field
from rillflow.records.ragged import Ragged
from rillflow.workers.messages import MAX_INLINE_BYTES, MessagePickler, Slot, loaded

MIN_APART_BYTES = 2**20
"""Fields of this size or more are separate objects, if a batch has several."""
MAX_REPLY_BYTES = 100 * 2**10
"""Ray's own limit: a smaller result returns to the caller inside the reply."""

Body = bytes | list[Any] | tuple[Any, list[Any]]
"""Payload for Ray: a message, with the references of its Slots if it has any."""


@dataclass(frozen=True, kw_only=True)
class PackedValue:
    """A serialised value."""

    body: Body
    """Bytes and large arrays."""
    references: tuple[Any, ...]
    """References that the Slots stand for."""
    own: tuple[Any, ...] = ()
    """References passed directly as arguments of the call; their values arrive with the call."""

    @property
    def nbytes(self) -> int:
        """Size of the body in bytes, without Ray's own frame."""
        return body_bytes(self.body)


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The last of several results of a call, with the size of the others that passed through the caller."""

    value: Any
    """The result."""
    beside_bytes: int
    """Bytes of other results and of arguments small enough to pass through the caller."""


@dataclass(frozen=True, kw_only=True)
class BatchApart:
    """A batch whose large fields are separate objects."""

    batch: Batch
    """Batch of the small fields."""
    order: tuple[str, ...]
    """Names of all fields."""
    apart: Mapping[str, Any]
    """References to the large fields."""

    def whole(self, fetched: Mapping[str, Any]) -> Batch:
        """Return the batch with the large fields that were fetched."""
        there = {**self.batch.fields, **fetched}
        return self.batch.with_fields(**{name: there[name] for name in self.order if name in there})


def packed(value: Any, *, is_call: bool = False) -> PackedValue:
    """Serialise a value; with ``is_call``, new references become direct arguments of the call.

    Raises:
        Exception: an error of the value's own pickling.
    """
    file = io.BytesIO()
    arrays: list[Any] = []

    def keep_inside(buffer: Any) -> bool:
        raw = buffer.raw()
        if raw.nbytes < MAX_INLINE_BYTES:
            return True
        arrays.append(np.frombuffer(raw, dtype=np.uint8))
        return False

    pickler = _Pickler(file, keep_inside, [] if is_call else None)
    pickler.dump(value)
    content = file.getvalue()
    body = [content, *arrays] if arrays else content
    return PackedValue(body=body, references=tuple(pickler.held.values()), own=tuple(pickler.own or ()))


def unpacked(body: Body) -> Any:
    """Deserialise a message's body; its references are Slots."""
    if isinstance(body, bytes):
        return loaded(body)
    assert isinstance(body, list)
    return loaded(body[0], body[1:])


def opened(
    bodies: Sequence[Body],
    get: Callable[[list[Any]], list[Any]],
    held: dict[str | int, Any] | None = None,
    fields: Collection[str] | None = None,
) -> tuple[list[Any], int]:
    """Deserialise fetched messages; return their values and their size in bytes.

    Args:
        bodies: the messages.
        get: fetches further messages.
        held: receives the references that Slots in tables stand for.
        fields: batch fields to fetch; None: all.
    """
    known, values, wanted = {} if held is None else held, list[Any](), list[Any]()
    total = sum(map(body_bytes, bodies))
    for body in bodies:
        inner, references = body if isinstance(body, tuple) else (body, [])
        value, own = unpacked(inner), by_name(references)
        if isinstance(value, BatchApart):
            names = [
                name for name in value.order if name in value.apart and (fields is None or name in fields)
            ]
            wanted += [(len(values), name, own[value.apart[name].name]) for name in names]
        else:
            known |= own
        if isinstance(value, Reply):
            total += value.beside_bytes
            value = value.value
        values.append(value)
    fetched = get([reference for *_, reference in wanted]) if wanted else []
    columns: dict[int, dict[str, Any]] = {}
    for (place, name, _), body in zip(wanted, fetched, strict=True):
        total += body_bytes(body)
        columns.setdefault(place, {})[name] = unpacked(body)
    for place, value in enumerate(values):
        if isinstance(value, BatchApart):
            values[place] = value.whole(columns.get(place, {}))
    return values, total


def replies(results: tuple[Any, ...], given: Sequence[Body], put: Callable[[Any], Any]) -> tuple[Body, ...]:
    """Serialise the results of one call; the last one also counts the bytes that passed through the caller.

    Args:
        results: results of the call.
        given: values of the call's own references.
        put: stores an object.
    """
    first = [_body(result, put) for result in results[:-1]]
    beside = sum(size for size in map(body_bytes, [*given, *first]) if size < MAX_REPLY_BYTES)
    return (*first, packed(Reply(value=results[-1], beside_bytes=beside)).body)


def _body(result: Any, put: Callable[[Any], Any]) -> Body:
    """Serialise a result; several large fields of a batch become separate objects."""
    large = {}
    if isinstance(result, Batch):
        large = {name: field for name, field in result.fields.items() if _nbytes(field) >= MIN_APART_BYTES}
    if len(large) < 2:
        return packed(result).body
    near = result.only(*(name for name in result.fields if name not in large))
    apart = {name: put(packed(field).body) for name, field in large.items()}
    message = packed(BatchApart(batch=near, order=tuple(result.fields), apart=apart))
    return message.body, list(message.references)


def _nbytes(field: Field) -> int:
    return (field.values if isinstance(field, Ragged) else field).nbytes


def body_bytes(body: Body) -> int:
    """Return the size of a body in bytes, without references."""
    if isinstance(body, tuple):
        return body_bytes(body[0])
    return len(body) if isinstance(body, bytes) else len(body[0]) + sum(array.nbytes for array in body[1:])


class _Pickler(MessagePickler):
    """Pickler that also replaces Ray's references by Slots."""

    def __init__(self, file: io.BytesIO, keep_inside: Any, own: list[Any] | None) -> None:
        super().__init__(file, keep_inside)
        self.held: dict[str, Any] = {}
        self.own = own

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, ray.ObjectRef):
            if self.own is not None:
                self.own.append(value)
                return Slot, (len(self.own) - 1,)
            name = value.hex()
            self.held[name] = value
            return Slot, (name,)
        if isinstance(value, PackedValue):
            self.held |= {reference.hex(): reference for reference in value.references}
            return unpacked, (value.body,)
        return super().reducer_override(value)


def by_name(references: list[Any]) -> dict[str | int, Any]:
    """Return references by the names that Slots use."""
    return {reference.hex(): reference for reference in references}
