"""Messages: values as Ray carries them, and what they weigh.

    value ── packed ──> small   bytes, which Ray hands on inside the call or its reply
                        large   [bytes, arrays]: arrays lie in the object store, and a reader on the
                                same machine maps them without a copy

References inside a value stay behind as names and travel beside it, so that Ray knows who holds them. Bytes
are cloudpickle: a call carries functions. They pass between the ranks of one run, never through a file.
Imported by ``cluster.ray``, which asks Ray for its protection first.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import numpy as np
import ray
import torch
from torch import Tensor

MAX_INLINE_BYTES = 32 * 2**10
"""A tensor of this size or more goes to the object store; smaller ones are copied into the message."""
MAX_REPLY_BYTES = 100 * 2**10
"""Ray's own limit: a result below it comes back to the caller inside the reply."""

Body = bytes | list[Any]
"""What is given to Ray."""


@dataclass(frozen=True)
class Slot:
    """A reference inside a message, by its name."""

    name: str
    """Of the object it refers to."""


@dataclass(frozen=True, kw_only=True)
class PackedValue:
    """A value ready to travel."""

    body: Body
    """Its bytes, with the arrays that are large."""
    references: tuple[Any, ...]
    """What its Slots stand for."""

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
    """Those of the other results that were small enough to come with it."""


def packed(value: Any) -> PackedValue:
    """A value as a message.

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

    pickler = _Pickler(file, buffer_callback=keep_inside)
    pickler.dump(value)
    content = file.getvalue()
    return PackedValue(
        body=[content, *arrays] if arrays else content, references=tuple(pickler.held.values())
    )


def unpacked(body: Body) -> Any:
    """The value of a message's body; its references are Slots."""
    if isinstance(body, bytes):
        return ray.cloudpickle.loads(body)
    return ray.cloudpickle.loads(body[0], buffers=body[1:])


def replies(results: tuple[Any, ...]) -> tuple[Body, ...]:
    """The results of one call as bodies, the last with what comes beside it."""
    first = [packed(result).body for result in results[:-1]]
    beside = sum(size for size in map(body_bytes, first) if size < MAX_REPLY_BYTES)
    return (*first, packed(Reply(value=results[-1], beside_bytes=beside)).body)


def body_bytes(body: Body) -> int:
    """What a body weighs."""
    return len(body) if isinstance(body, bytes) else len(body[0]) + sum(array.nbytes for array in body[1:])


class _Pickler(ray.cloudpickle.CloudPickler):  # type: ignore[misc]
    """Takes tensors as the memory they are, and references out."""

    def __init__(self, file: io.BytesIO, buffer_callback: Any) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffer_callback)
        self.held: dict[str, Any] = {}

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return _reduced(value)
        if isinstance(value, type | FunctionType):
            return NotImplemented if _is_ours(value) else super().reducer_override(value)
        if isinstance(value, ray.ObjectRef):
            name = value.hex()
            self.held[name] = value
            return Slot, (name,)
        if isinstance(value, PackedValue):
            self.held |= {reference.hex(): reference for reference in value.references}
            return unpacked, (value.body,)
        return super().reducer_override(value)


def by_name(references: list[Any]) -> Mapping[str, Any]:
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
