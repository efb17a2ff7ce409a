"""Wire: the frame format on sockets and in shared memory: JSON describes the message, arrays follow.

    0      4         6      8        12           16           24        64
    │ RILL │ version │ kind │ number │ JSON bytes │ body bytes │ (zeros) │ JSON │ (zeros) │ array │ ...

Little-endian; never pickle. The JSON is an object of at most 64 KiB; its ``arrays`` list the name, type,
shape and offset of every array. Arrays begin at multiples of 64 bytes, do not overlap, and lie inside the
body. Frames of one direction of a connection are numbered from 0, so that a repeated frame is refused.
"""

from __future__ import annotations

import json
import math
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rillflow.errors import StreamError

MAGIC = b"RILL"
VERSION = 1
HEAD_BYTES = 64
MAX_JSON_BYTES = 64 * 2**10
MAX_BODY_BYTES = 2**30
"""Largest body in bytes; a longer one is refused before anything is read or reserved."""
SMALL_BYTES = 2**18
"""Largest frame in bytes that is assembled in memory before it is written."""
ALIGNMENT = 64
ARRAY_TYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
_HEAD = struct.Struct("<4sHHIIQ")
_MAX_DIMENSIONS = 8

Arrays = Mapping[str, NDArray[Any]]


class WireError(StreamError):
    """Bytes that are not a frame of this version, or a frame that is too long."""


@dataclass(frozen=True, kw_only=True)
class Head:
    """The fixed header of a frame."""

    kind: int
    """Kind of the frame; requests and replies have different kinds."""
    number: int
    """Number of the frame in its connection, from 0."""
    json_bytes: int
    """Length of the JSON."""
    body_bytes: int
    """Length of the arrays, including padding."""

    @property
    def body_at(self) -> int:
        """Offset of the body in the frame."""
        return HEAD_BYTES + _aligned(self.json_bytes)


@dataclass(frozen=True, kw_only=True, eq=False)
class Message:
    """A frame that was read."""

    kind: int
    """Kind of the frame."""
    says: dict[str, Any]
    """The JSON, without ``arrays``."""
    arrays: Arrays = field(default_factory=dict)
    """Arrays by name, without a copy."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Packed:
    """A frame to write: the bytes before the body, and the offsets of its arrays."""

    front: bytes
    """Head and JSON, up to the body."""
    places: tuple[tuple[int, NDArray[Any]], ...]
    """Offset of each array in the frame, and the array."""
    nbytes: int
    """Length of the whole frame."""

    def write_into(self, buffer: memoryview | bytearray) -> None:
        """Copy the frame into a buffer; padding between arrays is left unchanged."""
        buffer[: len(self.front)] = self.front
        for place, array in self.places:
            np.ndarray(array.shape, array.dtype, buffer, place)[...] = array


def packed(kind: int, says: Mapping[str, Any], arrays: Arrays | None = None, *, number: int = 0) -> Packed:
    """Lay out a frame.

    Raises:
        WireError: the JSON or the body is too long, or an array has an unknown type.
    """
    table: list[list[Any]] = []
    at = 0
    for name, array in (arrays or {}).items():
        if array.dtype.name not in ARRAY_TYPES:
            raise WireError(f"array {name!r} is of type {array.dtype}", why=f"the types are {ARRAY_TYPES}")
        table.append([name, array.dtype.name, list(array.shape), at])
        at = _aligned(at + array.nbytes)
    text = json.dumps({**says, "arrays": table}, allow_nan=False, separators=(",", ":")).encode()
    _check_lengths(len(text), at)
    front = _HEAD.pack(MAGIC, VERSION, kind, number, len(text), at).ljust(HEAD_BYTES, b"\0") + text
    front = front.ljust(HEAD_BYTES + _aligned(len(text)), b"\0")
    places = tuple(
        (len(front) + row[3], array) for row, array in zip(table, (arrays or {}).values(), strict=True)
    )
    return Packed(front=front, places=places, nbytes=len(front) + at)


def head_of(data: bytes | memoryview, *, number: int | None = None) -> Head:
    """Parse the first 64 bytes of a frame.

    Raises:
        WireError: they are not a head, have another version or number, or announce too much.
    """
    magic, version, kind, found, json_bytes, body_bytes = _HEAD.unpack_from(data)
    if magic != MAGIC:
        raise WireError(f"a frame begins with {bytes(magic)!r}", why=f"frames begin with {MAGIC!r}")
    if version != VERSION:
        raise WireError(
            f"a frame of version {version}",
            why=f"this side uses version {VERSION}",
            fix="update the older side",
        )
    if number is not None and found != number:
        raise WireError(f"received frame {found} instead of {number}", why="a frame was repeated or lost")
    _check_lengths(json_bytes, body_bytes)
    return Head(kind=kind, number=found, json_bytes=json_bytes, body_bytes=body_bytes)


def message_of(head: Head, text: bytes, body: memoryview | bytes) -> Message:
    """Parse a frame's JSON, and view its arrays in the body.

    Raises:
        WireError: the JSON is invalid, or its list of arrays is inconsistent.
    """
    try:
        says = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WireError(f"a frame's JSON cannot be read: {error}") from None
    if not isinstance(says, dict) or not isinstance(table := says.pop("arrays", None), list):
        raise WireError("a frame's JSON is not an object with arrays")
    arrays: dict[str, NDArray[Any]] = {}
    end = 0
    for row in table:
        name, dtype, shape, at = _checked(row)
        count = math.prod(shape)
        if at < end or at % ALIGNMENT or at + count * np.dtype(dtype).itemsize > len(body) or name in arrays:
            raise WireError(f"array {name!r} of a frame, at {at}, overlaps another one or exceeds the body")
        arrays[name] = np.ndarray(shape, dtype, body, at) if count else np.empty(shape, dtype)
        end = at + arrays[name].nbytes
    return Message(kind=head.kind, says=says, arrays=arrays)


class Channel:
    """One end of a connection. It raises socket errors, and ``WireError`` for bytes that are not a frame.

    Args:
        connected: the socket.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._sent, self._received = count(), count()
        self._held = bytearray()

    def wait_at_most(self, seconds: float | None) -> None:
        """Set the time after which a send or receive without progress raises TimeoutError; None: no limit."""
        self._socket.settimeout(seconds)

    def send(
        self, kind: int, says: Mapping[str, Any], arrays: Arrays | None = None, *, later: bool = False
    ) -> None:
        """Write a frame; with ``later``, a small frame is sent together with the next one."""
        frame = packed(kind, says, arrays, number=next(self._sent))
        is_small = frame.nbytes <= SMALL_BYTES
        if is_small:
            whole = bytearray(frame.nbytes)
            frame.write_into(whole)
            self._held += whole
        if not (later and is_small) or len(self._held) > SMALL_BYTES:
            held, self._held = self._held, bytearray()
            self._socket.sendall(held)
        if is_small:
            return
        self._socket.sendall(frame.front)
        at = len(frame.front)
        for place, array in frame.places:
            self._socket.sendall(bytes(place - at))
            self._socket.sendall(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            at = place + array.nbytes
        self._socket.sendall(bytes(frame.nbytes - at))

    def receive(self) -> Message:
        """Wait for the next frame."""
        head = head_of(self._exactly(HEAD_BYTES), number=next(self._received))
        text = bytes(self._exactly(head.body_at - HEAD_BYTES)[: head.json_bytes])
        return message_of(head, text, self._exactly(head.body_bytes))

    def close(self) -> None:
        """End the connection."""
        self._socket.close()

    def _exactly(self, nbytes: int) -> memoryview:
        data = memoryview(bytearray(nbytes))
        at = 0
        while at < nbytes:
            got = self._socket.recv_into(data[at:])
            if not got:
                raise ConnectionError("the connection ended")
            at += got
        return data


def _checked(row: Any) -> tuple[str, str, list[int], int]:
    match row:
        case [str(name), str(dtype), list(shape), int(at)] if dtype in ARRAY_TYPES:
            sizes = [size for size in shape if type(size) is int and 0 <= size <= MAX_BODY_BYTES]
            if len(sizes) == len(shape) <= _MAX_DIMENSIONS and type(at) is int:
                return name, dtype, sizes, at
    raise WireError(
        f"a frame has the array entry {str(row)[:80]}", why="an entry is name, type, shape and offset"
    )


def _check_lengths(json_bytes: int, body_bytes: int) -> None:
    for what, found, most in (("JSON", json_bytes, MAX_JSON_BYTES), ("arrays", body_bytes, MAX_BODY_BYTES)):
        if found > most:
            raise WireError(
                f"a frame with {found} bytes of {what}",
                why=f"the limit is {most}",
                fix="send fewer groups at once",
            )


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
