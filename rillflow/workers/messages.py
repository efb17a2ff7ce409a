"""Messages: values as bytes that pass between the processes of one run.

    value ── dumped ──> content: bytes, with every small array
                        buffers: the memory of large arrays and tensors, which each backend moves its own way

Bytes are cloudpickle, because a call carries functions. They pass only between the ranks of one run, never
through a file. References inside a value become Slots, and travel next to the value.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import cloudpickle
import torch
from torch import Tensor

from rillflow.errors import ClusterError

MAX_INLINE_BYTES = 32 * 2**10
"""Arrays of this size or more are buffers; smaller ones are copied into the content."""


@dataclass(frozen=True)
class Slot:
    """Placeholder of a reference inside a message."""

    name: str | int
    """Name of the referenced object; for an own reference of a call on Ray, its position."""


class MessagePickler(cloudpickle.CloudPickler):  # type: ignore[misc]
    """Pickler that takes tensors as raw memory.

    Args:
        file: receives the content.
        keep_inside: called with each buffer; returns whether it is copied into the content.
    """

    def __init__(self, file: io.BytesIO, keep_inside: Callable[[Any], bool]) -> None:
        super().__init__(file, protocol=5, buffer_callback=keep_inside)

    def reducer_override(self, value: Any) -> Any:
        """Return how to rebuild a value; NotImplemented: as pickle does."""
        if isinstance(value, Tensor):
            return _reduced(value)
        if isinstance(value, type | FunctionType) and _is_ours(value):
            return NotImplemented
        return super().reducer_override(value)


def loaded(content: bytes, buffers: Sequence[Any] = ()) -> Any:
    """Return the value of a content and its buffers; its references are Slots."""
    return cloudpickle.loads(content, buffers=buffers)


def placeholder() -> Any:
    """Return a buffer that stands for one that the reader has already: ``keep_inside`` knows it again."""
    return pickle.PickleBuffer(bytearray(1))


def cannot_travel(what: str, error: BaseException) -> ClusterError:
    """Return the error of a value that cannot become bytes."""
    return ClusterError(
        f"{what} cannot be serialised: {error}",
        why="ranks are separate processes, and values pass between them as bytes",
        fix="pass plain values: batches, numbers, strings, settings, functions of a module",
    )


def heaviest(value: Any, size: Callable[[Any], int]) -> str:
    """Return the name of the largest option, or of one that cannot be serialised.

    Args:
        value: options by name; anything else has no names.
        size: serialises a value, and returns its bytes.
    """

    def weight(option: Any) -> float:
        try:
            return size(option)
        except Exception:  # noqa: BLE001  any error of its own pickling
            return float("inf")

    return f" {max(value, key=lambda name: weight(value[name]))!r}" if isinstance(value, dict) else ""


def _is_ours(value: Any) -> bool:
    """Return whether every rank finds a class or function by name, which skips cloudpickle's own check.

    A function of a class may be another object than what its name finds: pydantic wraps validators.
    """
    is_plain = isinstance(value, type) or "." not in value.__qualname__
    return (
        is_plain and value.__module__.startswith(("rillflow.", "rillflow_")) and "<" not in value.__qualname__
    )


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
        warnings.simplefilter("ignore")  # a store's memory is read-only; writes to a batch are refused
        return torch.frombuffer(content, dtype=kind).view(shape)
