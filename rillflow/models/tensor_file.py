"""Tensor file: safetensors, written as its own library does, byte for byte, but in a thread beside training.

    header {name: dtype, shape, offsets} ─┬─> file, flushed at the end
    tensors on the host, 16 MiB at a time ┴─> SHA-256

The library holds Python's lock while it writes, so that nothing else of the process goes on; and its files
have to be read again to be hashed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rillflow.observe.durable import write_flushed

KINDS = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint8: "U8",
}
"""Types as safetensors calls them, in the order in which a file has them."""
_ORDER = list(KINDS)
_CHUNK = 2**24
Digest = dict[str, Any]
"""The ``bytes`` and the ``sha256`` of a file."""


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> Digest:
    """Write tensors that lie on the host, contiguous.

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
    """A copy in the host's memory, for a thread to write while the tensor changes."""
    held = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return held.copy_(tensor.detach())


def _chunks(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None
) -> Iterator[bytes | memoryview]:
    names = sorted(tensors, key=lambda name: (_ORDER.index(tensors[name].dtype), name.encode()))
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    start = 0
    for name in names:
        tensor, stop = tensors[name], start + tensors[name].nbytes
        where = {"shape": list(tensor.shape), "data_offsets": [start, stop]}
        header[name] = {"dtype": KINDS[tensor.dtype], **where}
        start = stop
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        data = tensors[name].reshape(-1).view(torch.uint8).numpy().data
        yield from (data[first : first + _CHUNK] for first in range(0, len(data), _CHUNK))
