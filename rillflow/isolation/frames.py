"""Frames: length-prefixed JSON messages over a pipe. Never pickle.

    driver ── [length, 4 bytes big-endian][JSON, UTF-8] ──> child, and back the same way

Both ends are strict: any other bytes raise FrameError. The driver also limits an answer's size by the open
call: ``FrameReader.limit_bytes``.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from typing import Any

MAX_FRAME_BYTES = 1 << 30
"""Largest frame in bytes; a longer one is garbage, or a batch that belongs in several calls."""

_LENGTH = struct.Struct(">I")

Frame = dict[str, Any]


class FrameError(ValueError):
    """Bytes that are not a frame."""


def encode(frame: Frame) -> bytes:
    """Return the bytes of a frame.

    Raises:
        TypeError, ValueError: a value is not JSON.
        FrameError: the frame is too long.
    """
    body = json.dumps(frame).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {len(body)} bytes is longer than {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


def write_all(descriptor: int, data: bytes) -> None:
    """Write all bytes, with as many writes as needed."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


class FrameReader:
    """Assembler of frames from pieces of any size."""

    def __init__(self, limit_bytes: int = MAX_FRAME_BYTES) -> None:
        self.limit_bytes = limit_bytes
        """Largest frame in bytes; a longer one is refused before its body is read."""
        self._held = bytearray()

    @property
    def num_held(self) -> int:
        """Bytes of the incomplete frame."""
        return len(self._held)

    def feed(self, data: bytes) -> list[Frame]:
        """Return the frames that this piece completes.

        Raises:
            FrameError: the bytes are not a frame.
        """
        self._held += data
        frames = []
        while len(self._held) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._held)
            if length > self.limit_bytes:
                raise FrameError(f"a frame announces {length} bytes, but only {self.limit_bytes} are allowed")
            end = _LENGTH.size + length
            if len(self._held) < end:
                break
            frames.append(_decode(bytes(self._held[_LENGTH.size : end])))
            del self._held[:end]
        return frames


def read_frames(descriptor: int) -> Iterator[Frame]:
    """Yield every frame until the writer closes the pipe."""
    reader = FrameReader()
    while piece := os.read(descriptor, 1 << 20):
        yield from reader.feed(piece)


def _decode(body: bytes) -> Frame:
    try:
        frame = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"a frame is not JSON: {error}") from None
    if not isinstance(frame, dict) or not isinstance(frame.get("type"), str):
        raise FrameError("a frame is not an object with a type")
    return frame
