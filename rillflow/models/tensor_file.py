"""Tensor file: safetensors, byte for byte like the library's, but written in a thread during training.

    header {name: dtype, shape, offsets} ─┬─> file, flushed at the end
    tensors on the host, 16 MiB at a time ┴─> SHA-256

The library holds Python's lock while it writes, which stops all other threads; and its files would have to
be read again for hashing.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rillflow.runs.durable import write_flushed

KINDS = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint8: "U8",
}
"""Names of dtypes in safetensors, in the order of tensors in a file."""
_ORDER = list(KINDS)
_CHUNK = 2**24
Digest = dict[str, Any]
"""``bytes`` and ``sha256`` of a file."""


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> Digest:
    """Write contiguous tensors in host memory; return the file's size and hash.

    Raises:
        OSError: the disk fails.
    """
    sha, count = hashlib.sha256(), 0

    def hashed() -> Iterator[bytes | memoryview]:
        nonlocal count
        for chunk in _chunks(tensors, metadata):
            sha.update(chunk)
            count += len(chunk)
            yield chunk

    write_flushed(path, hashed())
    return {"bytes": count, "sha256": sha.hexdigest()}


def on_host(tensor: Tensor) -> Tensor:
    """Return a copy in host memory, to be written by a thread while the tensor changes."""
    held = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return held.copy_(tensor.detach())


def header(
    weights: Mapping[str, tuple[torch.dtype, Sequence[int]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, list[str]]:
    """Return a file's first bytes, and its weights in the order of their data.

    Args:
        weights: dtype and shape of each.
        metadata: metadata of the file.
    """
    names = sorted(weights, key=lambda name: (_ORDER.index(weights[name][0]), name.encode()))
    said: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    start = 0
    for name in names:
        dtype, shape = weights[name]
        stop = start + math.prod(shape) * dtype.itemsize
        said[name] = {"dtype": KINDS[dtype], "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(said, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, names


def _chunks(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None
) -> Iterator[bytes | memoryview]:
    first, names = header({name: (each.dtype, each.shape) for name, each in tensors.items()}, metadata)
    yield first
    for name in names:
        data = tensors[name].reshape(-1).view(torch.uint8).numpy().data
        yield from (data[start : start + _CHUNK] for start in range(0, len(data), _CHUNK))
