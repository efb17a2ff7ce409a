"""Delta: the exact difference of a tensor to the one that the receiver holds.

    new, base ── bits as ordered integers ── differ? ─┬─ positions ─┐
                                                      └─ new - base ┴─ sparse.packed ─> payload
    payload, base ── base + difference ── checksum of the new values ─> overwrites them

An update of bfloat16 weights moves most changed values by one or two steps of their grid, so a difference of
the ordered integers takes about two bits where the value takes sixteen. Integers are exact, so the receiver
gets the bits of the sender's tensor. The receiver's number of its tensor must be the base's. Damage is found
before a value is written.
"""

from __future__ import annotations

import struct
import zlib

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rillflow.errors import WeightError
from rillflow.sharding.codec import State
from rillflow_links.codecs.payload import Bits, Payload, host_bits, read, write_bits
from rillflow_links.codecs.sparse import (
    POSITIONS,
    damaged,
    integers_of_streams,
    integers_to_streams,
    packed,
    positions_of_streams,
    positions_to_streams,
    unpacked,
)

CODEC = 1
Integers = npt.NDArray[np.int64]
_WHOLE, _DIFFERENCE = 0, 1
_CHECK = struct.Struct("<I")
MOST = 2**32
"""Largest number of elements of one tensor."""


class Delta:
    """Differences, with a whole tensor first, and again at every ``full_every``-th time.

    Args:
        full_every: 1 sends whole tensors only.
    """

    def __init__(self, full_every: int) -> None:
        self._full_every = full_every

    def encode(self, tensor: Tensor, state: State) -> Tensor:
        """See Codec. The state has a copy of the tensor, and its number."""
        new = host_bits(tensor)
        number = int(state["number"]) + 1 if "number" in state else 1
        payload = None
        if number % self._full_every and "base" in state and new.size < MOST:
            payload = _difference(new, host_bits(state["base"]), number)
        if payload is None:
            payload = Payload(codec=CODEC, kind=_WHOLE, body=new.tobytes(), number=number)
        state["number"] = torch.tensor(number)
        if "base" in state:
            state["base"].copy_(tensor.detach())
        else:
            state["base"] = tensor.detach().cpu().clone()
        return payload.bytes_of(tensor)

    def decode(self, payload: Tensor, into: Tensor, state: State) -> None:
        """See Codec. The state has the number of the tensor that ``into`` holds."""
        given = read(payload, CODEC, into)
        held = int(state["number"]) if "number" in state else 0
        if given.kind == _WHOLE:
            if len(given.body) != into.nbytes:
                raise damaged(f"{len(given.body):,} bytes of {into.nbytes:,} arrived")
            new = np.frombuffer(given.body, np.uint8).view(f"<i{into.dtype.itemsize}")
        else:
            if given.base != held:
                raise WeightError(
                    f"a difference to version {given.base} arrived",
                    why=f"the receiver holds version {held}" if held else "the receiver holds no version yet",
                    fix="send the whole tensor to this receiver, then differences",
                )
            new = _added(given, host_bits(into))
        write_bits(new, into)
        state["number"] = torch.tensor(given.number)


def ordered(bits: Bits) -> Integers:
    """Return integers in the order of the floating-point values of some bits; its own inverse.

    Neighbouring values have neighbouring integers; -0.0 has -1, and 0.0 has 0.
    """
    wide = bits.astype(np.int64)
    return np.where(wide < 0, wide ^ np.int64(2 ** (8 * bits.dtype.itemsize - 1) - 1), wide)


def _modulo(values: Integers, width: int) -> Integers:
    """Return integers modulo 2^(8 width), from -2^(8 width - 1) on; 64 bits wrap by themselves."""
    if width == 8:
        return values
    half = np.int64(2 ** (8 * width - 1))
    return (values + half) % (2 * half) - half


def _difference(new: Bits, base: Bits, number: int) -> Payload | None:
    """Return a difference, or None if the whole tensor is not larger."""
    places = np.flatnonzero(new != base)
    width = new.dtype.itemsize
    steps = ordered(new[places]) - ordered(base[places])  # modulo 2^64 for 8 bytes
    steps = _modulo(steps, width)
    streams = [*positions_to_streams(places), *integers_to_streams(steps, width)]
    body = _CHECK.pack(zlib.crc32(new[places].tobytes())) + packed(streams)
    if len(body) >= new.nbytes:
        return None
    return Payload(codec=CODEC, kind=_DIFFERENCE, body=body, number=number, base=number - 1)


def _added(given: Payload, base: Bits) -> Bits:
    """Return the new bits."""
    width = base.dtype.itemsize
    if len(given.body) < _CHECK.size:
        raise damaged("its difference is cut off")
    (checksum,) = _CHECK.unpack_from(given.body)
    streams = unpacked(given.body[_CHECK.size :], POSITIONS + width)
    places = positions_of_streams(*streams[:POSITIONS])
    if len(places) and int(places[-1]) >= base.size:
        raise damaged("its positions do not fit the tensor")
    steps = integers_of_streams(streams[POSITIONS:], len(places))
    wide = ordered(base[places]) + steps
    wide = _modulo(wide, width)
    changed = ordered(wide.astype(base.dtype)).astype(base.dtype)
    if zlib.crc32(changed.tobytes()) != checksum:
        raise WeightError(
            "a difference does not give the sender's values",
            why=f"the receiver's tensor is not the version {given.base} that the difference belongs to",
            fix="send the whole tensor to this receiver, then differences",
        )
    new = base.copy()
    new[places] = changed
    return new
