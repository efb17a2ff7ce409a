"""Messages: values as Ray carries them, and what they weigh.

    value ── packed ──> small   bytes, which Ray hands on inside the call or its reply
                        large   [bytes, arrays]: arrays lie in the object store, and a reader on the
                                same machine maps them without a copy

References inside a value stay behind as names and travel beside it, so that Ray knows who holds them: of a
call, of a table of references, and of a batch whose large fields lie in the store one by one, so that a rank
fetches those it reads. Bytes are cloudpickle: a call carries functions. They pass between the ranks of one
run, never through a file.
Imported by ``cluster.ray``, which asks Ray for its protection first.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import numpy as np
import ray
import torch
from torch import Tensor

from rillflow.records.batch import Batch, Field
from rillflow.records.ragged import Ragged

MAX_INLINE_BYTES = 32 * 2**10
"""A tensor of this size or more goes to the object store; smaller ones are copied into the message."""
MIN_APART_BYTES = 2**20
"""A field of this size or more is an object of its own, where a batch has several."""
MAX_REPLY_BYTES = 100 * 2**10
"""Ray's own limit: a result below it comes back to the caller inside the reply."""

Body = bytes | list[Any] | tuple[Any, list[Any]]
"""What is given to Ray: a message, with the references that its Slots stand for where it has some."""


@dataclass(frozen=True)
class Slot:
    """A reference inside a message."""

    name: str | int
    """Of the object it refers to; of a call's own, its place among them."""


@dataclass(frozen=True, kw_only=True)
class PackedValue:
    """A value ready to travel."""

    body: Body
    """Its bytes, with the arrays that are large."""
    references: tuple[Any, ...]
    """What its Slots stand for."""
    own: tuple[Any, ...] = ()
    """References that stand in a call's arguments as they are: what they refer to comes with the call."""

    @property
    def nbytes(self) -> int:
        """What the body weighs, Ray's own frame aside."""
        return body_bytes(self.body)


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The last result of a call that has several, and the bytes of the others that came beside it."""

    value: Any
    """The result."""
    beside_bytes: int
    """Those of the other results, and of what was taken, that were small enough to go through the caller."""


@dataclass(frozen=True, kw_only=True)
class BatchApart:
    """A batch whose large fields are objects of their own."""

    batch: Batch
    """The other fields."""
    order: tuple[str, ...]
    """All fields."""
    apart: Mapping[str, Any]
    """References to the large ones."""

    def whole(self, fetched: Mapping[str, Any]) -> Batch:
        """The batch with what was fetched of these."""
        there = {**self.batch.fields, **fetched}
        return self.batch.with_fields(**{name: there[name] for name in self.order if name in there})


def packed(value: Any, *, is_call: bool = False) -> PackedValue:
    """A value as a message; in a call's, references that were not packed before are its own.

    Raises:
        Exception: whatever the value's own pickling raises.
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
    """The value of a message's body; its references are Slots."""
    if isinstance(body, bytes):
        return ray.cloudpickle.loads(body)
    assert isinstance(body, list)
    return ray.cloudpickle.loads(body[0], buffers=body[1:])


def opened(
    bodies: Sequence[Body],
    get: Callable[[list[Any]], list[Any]],
    held: dict[str | int, Any] | None = None,
    fields: Collection[str] | None = None,
) -> tuple[list[Any], int]:
    """The values of messages that were fetched, and their bytes.

    Args:
        bodies: the messages.
        get: fetches further ones.
        held: takes what the Slots of tables of references stand for.
        fields: what is wanted of batches; None: all.
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
    """The results of one call as bodies, the last with what came through the caller beside its message.

    Args:
        results: of the call.
        given: its own references' values.
        put: makes an object.
    """
    first = [_body(result, put) for result in results[:-1]]
    beside = sum(size for size in map(body_bytes, [*given, *first]) if size < MAX_REPLY_BYTES)
    return (*first, packed(Reply(value=results[-1], beside_bytes=beside)).body)


def _body(result: Any, put: Callable[[Any], Any]) -> Body:
    """A result's message; a batch with several large fields has them apart."""
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
    """What a body weighs, references aside."""
    if isinstance(body, tuple):
        return body_bytes(body[0])
    return len(body) if isinstance(body, bytes) else len(body[0]) + sum(array.nbytes for array in body[1:])


class _Pickler(ray.cloudpickle.CloudPickler):  # type: ignore[misc]
    """Takes tensors as the memory they are, and references out."""

    def __init__(self, file: io.BytesIO, buffer_callback: Any, own: list[Any] | None) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffer_callback)
        self.held: dict[str, Any] = {}
        self.own = own

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return _reduced(value)
        if isinstance(value, type | FunctionType):
            return NotImplemented if _is_ours(value) else super().reducer_override(value)
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
    """References as Slots name them."""
    return {reference.hex(): reference for reference in references}


def _is_ours(value: Any) -> bool:
    """Whether a class or function is found by its name on every rank; it saves asking what kind it is.

    A function of a class may be another object than what its name finds: pydantic wraps validators.
    """
    is_plain = isinstance(value, type) or "." not in value.__qualname__
    return is_plain and value.__module__.startswith("rillflow.") and "<" not in value.__qualname__


def _reduced(tensor: Tensor) -> tuple[Any, ...]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    memory = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    content = memory if memory.nbytes >= MAX_INLINE_BYTES else bytearray(memory)
    return _tensor, (content, dtype, tuple(tensor.shape))


def _tensor(content: Any, dtype: str, shape: tuple[int, ...]) -> Tensor:
    kind: torch.dtype = vars(torch)[dtype]
    if not len(content):
        return torch.empty(shape, dtype=kind)
    if isinstance(content, bytearray):
        return torch.frombuffer(content, dtype=kind).view(shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the store's memory is read-only; who writes to a batch is refused
        return torch.frombuffer(content, dtype=kind).view(shape)
