"""Payload: the header of every codec's bytes, with a checksum, so that nothing damaged is decoded.

    header   magic, codec, kind ─ dtype, elements ─ own number, base's number ─ checksum
    body     the codec's bytes

The checksum covers header and body.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rillflow.errors import WeightError
from rillflow_links.codecs.sparse import damaged

_HEADER, _CHECKSUM = struct.Struct("<2sBBBQII"), struct.Struct("<I")
_MAGIC = b"RL"
Bits = npt.NDArray[Any]
"""Bits of a tensor as signed integers of its width."""
_DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64),
)


@dataclass(frozen=True, kw_only=True)
class Payload:
    """A decoded header and the codec's own bytes."""

    codec: int
    """Number of the codec."""
    kind: int
    """A form of the codec, such as whole or difference."""
    body: bytes
    """Bytes of the codec."""
    number: int = 0
    """Number of the tensor on its edge, from 1."""
    base: int = 0
    """Number of the tensor that it differs from; 0 for none."""

    def bytes_of(self, tensor: Tensor) -> Tensor:
        """Return the payload's bytes [N] for a tensor of this shape and dtype."""
        kind = _DTYPES.index(tensor.dtype)
        fields = (_MAGIC, self.codec, self.kind, kind, tensor.numel(), self.number, self.base)
        head = _HEADER.pack(*fields)
        checksum = _CHECKSUM.pack(zlib.crc32(self.body, zlib.crc32(head)))
        return torch.frombuffer(bytearray(head + checksum + self.body), dtype=torch.uint8)


def read(payload: Tensor, codec: int, into: Tensor) -> Payload:
    """Return a payload that a codec wrote for a tensor like ``into``.

    Raises:
        WeightError: it is damaged, another codec's, or of another shape or dtype.
    """
    data = payload.detach().cpu().contiguous().numpy().tobytes()
    head, body = data[: _HEADER.size], data[_HEADER.size + _CHECKSUM.size :]
    checksum = data[_HEADER.size : _HEADER.size + _CHECKSUM.size]
    if len(checksum) < _CHECKSUM.size or not head.startswith(_MAGIC):
        raise damaged(f"it has {len(data)} bytes and no header of a codec")
    if _CHECKSUM.pack(zlib.crc32(body, zlib.crc32(head))) != checksum:
        raise damaged("its checksum does not match its bytes")
    _, own, kind, dtype, count, number, base = _HEADER.unpack(head)
    if own != codec:
        raise WeightError(
            f"a payload is of codec {own}",
            why=f"this end of the edge decodes codec {codec}",
            fix="set the same codec in [links] on both ends",
        )
    if dtype >= len(_DTYPES) or _DTYPES[dtype] is not into.dtype or count != into.numel():
        name = str(_DTYPES[dtype]).removeprefix("torch.") if dtype < len(_DTYPES) else f"dtype {dtype}"
        raise WeightError(
            f"a payload holds {count:,} values of {name}",
            why=f"the receiver's tensor has {into.numel():,} of {str(into.dtype).removeprefix('torch.')}",
            fix="use the same model, dtype and layout on both ends",
        )
    return Payload(codec=own, kind=kind, body=body, number=number, base=base)


def host_bits(tensor: Tensor) -> Bits:
    """Return a flat view, or a copy from a device, of a tensor's bits as signed integers of its width."""
    flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return flat.view(f"<i{tensor.dtype.itemsize}")


def write_bits(bits: Bits, into: Tensor) -> None:
    """Write bits of ``host_bits`` over a tensor."""
    whole = torch.from_numpy(np.array(bits).view(np.uint8))
    into.detach().copy_(whole.view(into.dtype).view(into.shape))


def bytes_of(tensor: Tensor) -> bytes:
    """Return the bytes of a host tensor."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def floats(data: bytes, dtype: torch.dtype) -> Tensor:
    """Return the values [N] of some bytes.

    Raises:
        WeightError: the last value is cut off.
    """
    if len(data) % dtype.itemsize:
        raise damaged("its last value is cut off")
    return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
