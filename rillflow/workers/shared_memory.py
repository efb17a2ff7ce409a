"""Shared memory: pass values between the processes of a machine, large arrays in anonymous memory.

    value ── Parcel.of ──> content: bytes               ──┐
                           segments: one memfd,         ──┴─ Frame ── one packet of a Unix socket ──> reader
                           which all arrays share

A segment (``workers.segments``) has no name. Its descriptor travels with the packet, and the kernel frees the
memory with its last holder, so nothing is left of processes that are killed. A reader maps a segment without
a copy. The mapping is private: what a reader writes there, nobody else sees.
"""

from __future__ import annotations

import io
import os
import socket
import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rillflow.errors import ClusterError
from rillflow.workers.messages import MAX_INLINE_BYTES, MessagePickler, Slot, loaded, placeholder
from rillflow.workers.segments import MemorySegment, SegmentPool

PACKET_BYTES = 2**16
"""Largest packet; a larger frame is in a segment of its own. A socket's usual buffer holds three of them."""
MAX_DESCRIPTORS = 253
"""Linux's limit of descriptors in one packet."""
MAX_CONTENT_BYTES = 2**13
"""A larger content is in shared memory too, so that the driver forwards it unseen."""
_COUNT = struct.Struct("<q")


@dataclass(frozen=True, kw_only=True)
class Parcel:
    """A serialised value; pickled within another one, it arrives as the value."""

    content: bytes
    """Bytes of the value without its buffers; empty: the last buffer has them."""
    segments: tuple[MemorySegment, ...] = ()
    """Shared memory of its buffers."""
    layout: tuple[int, ...] = ()
    """Index of the segment, offset and size of each buffer, one after the other."""
    references: tuple[Any, ...] = ()
    """References that the Slots stand for; they stay in the process that made the parcel."""

    @staticmethod
    def of(value: Any, pool: SegmentPool, reference: type | None = None) -> Parcel:
        """Serialise a value.

        Args:
            value: the value.
            pool: gives the shared memory.
            reference: class of the references in it, which have a ``name``; None: it has none.

        Raises:
            Exception: an error of the value's own pickling.
        """
        file, collected = io.BytesIO(), _Collected()
        _ParcelPickler(file, collected, reference).dump(value)
        return collected.parcel(file.getvalue(), pool)

    @property
    def nbytes(self) -> int:
        """Bytes of the content and of the buffers."""
        return len(self.content) + sum(self.layout[2::3])

    def open(self) -> Any:
        """Return the value."""
        if not self.layout:
            return loaded(self.content)
        mapped = [segment.mapped() for segment in self.segments]
        buffers = [mapped[index][start : start + size] for index, start, size in _threes(self.layout)]
        return _opened(self.content, buffers)


class _Collected:
    """What a pickler puts beside the content; no part of the pickler, so that both end with the last use."""

    def __init__(self) -> None:
        self.references: list[Any] = []
        self.segments: list[MemorySegment] = []
        self._large: list[Any] = []
        self._layout: list[list[int]] = []
        self._known: dict[int, list[int]] = {}
        self._placeholders: list[Any] = []

    def add(self, parcel: Parcel) -> list[Any]:
        """Take the segments of a parcel inside the value; return placeholders for its buffers."""
        first = len(self.segments)
        self.segments += parcel.segments
        self.references += parcel.references
        views = [placeholder() for _ in range(len(parcel.layout) // 3)]
        for view, (index, start, size) in zip(views, _threes(parcel.layout), strict=True):
            self._known[id(view)] = [first + index, start, size]
        self._placeholders += views  # an id is unique only while its object lives
        return views

    def keep_inside(self, buffer: Any) -> bool:
        """See MessagePickler."""
        if (known := self._known.get(id(buffer))) is not None:
            self._layout.append(known)
            return False
        raw = buffer.raw()
        if raw.nbytes < MAX_INLINE_BYTES:
            return True
        self._put(raw, raw.nbytes)
        return False

    def parcel(self, content: bytes, pool: SegmentPool) -> Parcel:
        """Return the parcel of a value that has been pickled."""
        if len(content) > MAX_CONTENT_BYTES:
            self._put(content, len(content))
            content = b""
        if self._large:
            segment, offsets = pool.hold(self._large)
            for each, offset in zip((each for each in self._layout if each[0] < 0), offsets, strict=True):
                each[:2] = len(self.segments), offset
            self.segments.append(segment)
        return Parcel(
            content=content,
            segments=tuple(self.segments),
            layout=tuple(number for each in self._layout for number in each),
            references=tuple(self.references),
        )

    def _put(self, content: Any, size: int) -> None:
        self._large.append(content)
        self._layout.append([-1, 0, size])


class _ParcelPickler(MessagePickler):
    """Pickler that takes references and parcels inside the value apart."""

    def __init__(self, file: io.BytesIO, collected: _Collected, reference: type | None) -> None:
        super().__init__(file, collected.keep_inside)
        self._collected, self._reference = collected, reference

    def reducer_override(self, value: Any) -> Any:
        """See MessagePickler."""
        if self._reference is not None and isinstance(value, self._reference):
            self._collected.references.append(value)
            return Slot, (value.name,)  # type: ignore[attr-defined]
        if isinstance(value, Parcel):
            return _opened, (value.content, self._collected.add(value))
        return super().reducer_override(value)


def _opened(content: bytes, buffers: list[Any]) -> Any:
    """Return the value of a parcel."""
    return loaded(content or bytes(buffers.pop()), buffers)


def _threes(numbers: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    return zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True)


@dataclass(frozen=True, kw_only=True)
class Frame:
    """One message between the driver and a rank.

    On the wire: a count of numbers, the numbers, the contents of the parcels.
    """

    kind: int
    """What it is about."""
    numbers: tuple[int, ...] = ()
    """Numbers, as its kind needs them."""
    parcels: tuple[Parcel, ...] = ()
    """Values."""

    def packet(self, pool: SegmentPool) -> tuple[bytes, list[MemorySegment]]:
        """Return the packet, and the segments whose descriptors go with it.

        Args:
            pool: gives the memory of a packet that is too large for a socket.

        Raises:
            ClusterError: it has more segments than a packet carries.
        """
        numbers = array("q", (self.kind, len(self.numbers), *self.numbers))
        for each in self.parcels:
            numbers.extend((len(each.content), len(each.segments), len(each.layout)))
            numbers.extend(segment.size for segment in each.segments)
            numbers.extend(each.layout)
        contents = b"".join(each.content for each in self.parcels)
        segments = [segment for each in self.parcels for segment in each.segments]
        sent = _COUNT.pack(len(numbers)) + numbers.tobytes() + contents
        if len(segments) >= MAX_DESCRIPTORS:
            raise ClusterError(
                f"a message has {len(segments)} values with large arrays",
                why=f"Linux sends {MAX_DESCRIPTORS} descriptors in a packet, and each value needs one",
                fix="pass the arrays in fewer arguments, or join them",
            )
        if len(sent) > PACKET_BYTES:
            whole, _ = pool.hold([sent])
            return _COUNT.pack(-whole.size), [whole, *segments]
        return sent, segments

    @staticmethod
    def received(packet: bytes, descriptors: Sequence[int]) -> Frame:
        """Return the frame of a packet."""
        descriptors = list(descriptors)
        (count,) = _COUNT.unpack_from(packet)
        if count < 0:
            whole = MemorySegment(descriptors.pop(0), -count)
            packet = whole.mapped().tobytes()
            (count,) = _COUNT.unpack_from(packet)
        end = 8 * (count + 1)
        numbers = struct.unpack(f"<{count}q", packet[8:end])
        own, parcels = 2 + numbers[1], list[Parcel]()
        at = own
        while at < count:
            length, num_segments, size = numbers[at : at + 3]
            at += 3
            segments = tuple(
                MemorySegment(descriptors.pop(0), length_bytes)
                for length_bytes in numbers[at : at + num_segments]
            )
            at += num_segments
            layout = numbers[at : at + size]
            at += size
            parcels.append(Parcel(content=packet[end : end + length], segments=segments, layout=layout))
            end += length
        return Frame(kind=numbers[0], numbers=numbers[2:own], parcels=tuple(parcels))


def send(connection: socket.socket, packet: bytes, segments: Sequence[MemorySegment]) -> None:
    """Send a packet as a whole.

    Raises:
        BlockingIOError: the socket does not wait, and has no room.
        OSError: the other process has gone.
    """
    if segments:
        socket.send_fds(connection, [packet], [each.descriptor for each in segments])
    else:
        connection.send(packet)


def receive(connection: socket.socket) -> Frame | None:
    """Return the next frame; None if the other process has gone.

    Raises:
        BlockingIOError: the socket does not wait, and there is none.
        ClusterError: this process has too many open files to receive its descriptors.
    """
    packet, descriptors, flags, _ = socket.recv_fds(connection, PACKET_BYTES, MAX_DESCRIPTORS)
    if flags & socket.MSG_CTRUNC:
        for each in descriptors:
            os.close(each)
        raise ClusterError(
            "a value with large arrays could not be received",
            why="this process has too many open files",
            fix="raise the limit with ulimit -n, or let results go that are no longer needed",
        )
    return Frame.received(packet, descriptors) if packet else None
