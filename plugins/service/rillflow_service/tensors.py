"""Tensors: columns as an HTTP body in the safetensors format; ``__metadata__`` has the request as JSON.

8 bytes: length of the header │ header, JSON of at most 64 KiB │ arrays, contiguous in the header's order

The library safetensors copies arrays and knows no bfloat16 of numpy; here arrays are views of the body.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from rillflow.data_plane.schema import DTYPES
from rillflow.workers.wire import MAX_JSON_BYTES, WireError
from rillflow_service.segments import STORED

NAMES = dict(zip(DTYPES, ("BOOL", "U8", "I8", "I16", "I32", "I64", "F16", "BF16", "F32", "F64"), strict=True))
"""Names of the types in safetensors, by our own."""
TYPES = {name: dtype for dtype, name in NAMES.items()}
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
    return b"".join([len(text).to_bytes(8, "little"), text, *(array.tobytes() for array in arrays.values())])


class _Entry(BaseModel, strict=True):
    dtype: str
    shape: Annotated[list[Annotated[int, Field(ge=0, lt=2**40)]], Field(max_length=8)]
    data_offsets: Annotated[list[int], Field(min_length=2, max_length=2)]


_ENTRIES = TypeAdapter(dict[str, _Entry])


def decoded(
    body: bytes | bytearray, most_header: int = MAX_JSON_BYTES
) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Return the request of a body, and its arrays without a copy; bfloat16 arrives as int16 bits.

    Raises:
        WireError: it is not a safetensors file, or its header is inconsistent or longer than ``most_header``.
    """
    length = int.from_bytes(body[:8], "little") if len(body) >= 8 else len(body)
    if length > min(most_header, len(body) - 8):
        raise WireError(
            f"a header of {length} bytes in a body of {len(body)}", why=f"the limit is {most_header}"
        )
    try:
        header = json.loads(bytes(body[8 : 8 + length]))
        says = json.loads(header.pop("__metadata__", {}).get(REQUEST, "{}"))
        entries = _ENTRIES.validate_python(header)
    except (ValidationError, ValueError, RecursionError, AttributeError, TypeError) as error:
        raise WireError(f"the header of the body cannot be read: {str(error)[:300]}") from None
    if not isinstance(says, dict):
        raise WireError("the request in the body's metadata is not a JSON object")
    arrays: dict[str, NDArray[Any]] = {}
    at = begin = 8 + length
    for name, entry in entries.items():
        if entry.dtype not in TYPES:
            raise WireError(f"array {name!r} of the body is {entry.dtype[:20]}", why=f"types are {[*TYPES]}")
        dtype = np.dtype(STORED.get(TYPES[entry.dtype], TYPES[entry.dtype]))
        size = math.prod(entry.shape)
        stop = at + size * dtype.itemsize
        if [begin + offset for offset in entry.data_offsets] != [at, stop] or stop > len(body):
            raise WireError(f"array {name!r} of the body has wrong offsets", why="arrays must be contiguous")
        flat = np.frombuffer(body, dtype, size, at) if size else np.empty(0, dtype)
        arrays[name], at = flat.reshape(entry.shape), stop
    if at != len(body):
        raise WireError(f"the body has {len(body) - at} bytes that belong to no array")
    return says, arrays
