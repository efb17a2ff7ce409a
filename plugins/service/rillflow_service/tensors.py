"""Tensors: columns as an HTTP body in the safetensors format; ``__metadata__`` has the request as JSON.

8 bytes: length of the header │ header, JSON of at most 64 KiB │ arrays, contiguous in the header's order
"""

from __future__ import annotations

import json
import math
import mmap
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rillflow.workers.wire import MAX_JSON_BYTES, WireError
from rillflow_service.segments import STORED

TYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
}
NAMES = {dtype: name for name, dtype in TYPES.items()}
REQUEST = "request"


def encoded(
    says: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]], halves: frozenset[str] = frozenset()
) -> bytes:
    """Return a body; int16 arrays named in ``halves`` hold the bits of bfloat16."""
    header: dict[str, Any] = {"__metadata__": {REQUEST: json.dumps(says, allow_nan=False)}}
    at = 0
    for name, array in arrays.items():
        dtype = "bfloat16" if name in halves else array.dtype.name
        header[name] = {"dtype": NAMES[dtype], "shape": array.shape, "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    text = json.dumps(header).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    return b"".join([struct.pack("<Q", len(text)), text, *(array.tobytes() for array in arrays.values())])


def decoded(
    body: bytes | bytearray | mmap.mmap, most_header: int = MAX_JSON_BYTES
) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Return the request of a body, and its arrays without a copy; bfloat16 arrives as int16 bits.

    Args:
        body: the bytes.
        most_header: largest header in bytes.

    Raises:
        WireError: it is not a safetensors file, or its header is inconsistent.
    """
    length = struct.unpack_from("<Q", body)[0] if len(body) >= 8 else len(body)
    if length > min(most_header, len(body) - 8):
        raise WireError(
            f"a header of {length} bytes in a body of {len(body)}", why=f"the limit is {most_header}"
        )
    try:
        header = json.loads(bytes(body[8 : 8 + length]))
        says = json.loads(header.pop("__metadata__", {}).get(REQUEST, "{}"))
    except (ValueError, RecursionError, AttributeError, TypeError) as error:
        raise WireError(f"the header of the body cannot be read: {error}") from None
    if not isinstance(says, dict):
        raise WireError("the request in the body's metadata is not a JSON object")
    arrays: dict[str, NDArray[Any]] = {}
    at = 8 + length
    for name, entry in header.items():
        match entry:
            case {"dtype": str(kind), "shape": list(shape), "data_offsets": [int(start), int(end)]} if (
                kind in TYPES
                and len(shape) <= 8
                and all(type(size) is int and 0 <= size < 2**40 for size in shape)
            ):
                dtype = np.dtype(STORED.get(TYPES[kind], TYPES[kind]))
                nbytes = math.prod(shape) * dtype.itemsize
            case _:
                raise WireError(f"array {name!r} of the body has the invalid entry {str(entry)[:80]}")
        if 8 + length + start != at or end - start != nbytes or at + nbytes > len(body):
            raise WireError(f"array {name!r} of the body has wrong offsets", why="arrays must be contiguous")
        arrays[name] = (
            np.frombuffer(body, dtype, math.prod(shape), at).reshape(shape)
            if nbytes
            else np.empty(shape, dtype)
        )
        at += nbytes
    if at != len(body):
        raise WireError(f"the body has {len(body) - at} bytes that belong to no array")
    return says, arrays


def entries(body: bytes | bytearray | mmap.mmap) -> dict[str, list[Any]]:
    """Return type and shape of the arrays of a body that ``decoded`` has read, by name."""
    length = struct.unpack_from("<Q", body)[0]
    header = json.loads(bytes(body[8 : 8 + length]))
    header.pop("__metadata__", None)
    return {name: [entry["dtype"], entry["shape"]] for name, entry in header.items()}
