"""Sparse: positions and small integers as bytes near their entropy.

    sorted positions ─ gaps, less 1 ─┬─ lowest bits, packed ────────────────────────────────┐
                                     └─ the rest, a byte each; 255 and 4 bytes if larger ───┤
    integers ─ zigzag ─> byte planes, the lowest first; planes of zeros are left out ───────┴─ zstd ─> bytes

For positions drawn with probability p the gaps are geometric, and their entropy is that of the positions,
n H(p). The lowest bits of such a gap are nearly uniform, so they are stored as they are. The rest has a mean
of 4 to 8, which zstd codes within a few per cent of its entropy, by its Huffman stage.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import zstandard

from rillflow.errors import WeightError

Bytes = npt.NDArray[np.uint8]
LEVEL = 1
"""Level of zstd; higher ones are slower and code independent bytes no better."""
POSITIONS = 4
"""Streams of positions."""
_LONG = 255


def positions_to_streams(positions: npt.NDArray[np.int64]) -> list[Bytes]:
    """Return four streams: the number of lowest bits, these bits, the rest, and what exceeds a byte of it.

    Args:
        positions: ascending positions [K], each below 2^32.
    """
    gaps = np.diff(positions, prepend=-1) - 1
    mean = float(gaps.mean()) if gaps.size else 0.0
    low = max(0, int(mean).bit_length() - 3)
    bits = (gaps[:, None] >> np.arange(low)) & 1
    rest = gaps >> low
    is_long = rest >= _LONG
    return [
        np.array([low], np.uint8),
        np.packbits(bits.astype(np.uint8)),
        np.where(is_long, _LONG, rest).astype(np.uint8),
        rest[is_long].astype("<u4").view(np.uint8),
    ]


def positions_of_streams(low: Bytes, packed_bits: Bytes, rest: Bytes, long: Bytes) -> npt.NDArray[np.int64]:
    """Return the positions of ``positions_to_streams``.

    Raises:
        WeightError: the streams do not belong together.
    """
    count, width = rest.size, int(low[0]) if low.size == 1 else -1
    is_long = rest == _LONG
    if not 0 <= width < 32 or packed_bits.size != -(-count * width // 8) or long.size != 4 * is_long.sum():
        raise damaged("the positions are not whole")
    gaps = rest.astype(np.int64)
    gaps[is_long] = long.view("<u4")
    bits = np.unpackbits(packed_bits, count=count * width).reshape(count, width).astype(np.int64)
    gaps = (gaps << width) + (bits << np.arange(width)).sum(1)
    return np.cumsum(gaps + 1) - 1


def integers_to_streams(values: npt.NDArray[np.int64], planes: int) -> list[Bytes]:
    """Return the byte planes of integers, zigzag coded; planes of zeros are empty.

    Args:
        values: integers [K], each below 2^(8 planes - 1) in magnitude, modulo 2^(8 planes).
        planes: number of planes.
    """
    coded = ((values << 1) ^ (values >> 63)).astype("<u8")
    whole = coded.view(np.uint8).reshape(-1, 8)
    return [
        np.ascontiguousarray(whole[:, plane]) if whole[:, plane].any() else np.empty(0, np.uint8)
        for plane in range(planes)
    ]


def integers_of_streams(streams: Sequence[Bytes], count: int) -> npt.NDArray[np.int64]:
    """Return the integers [count] of ``integers_to_streams``.

    Raises:
        WeightError: a plane has another length.
    """
    whole = np.zeros((count, 8), np.uint8)
    for plane, stream in enumerate(streams):
        if len(stream) not in (0, count):
            raise damaged("a plane of the values is not whole")
        if len(stream):
            whole[:, plane] = stream
    coded = whole.view("<u8").reshape(-1)
    return (coded >> np.uint64(1)).astype(np.int64) ^ -(coded & np.uint64(1)).astype(np.int64)


def packed(streams: Sequence[Bytes]) -> bytes:
    """Return streams as one text of bytes; each is compressed if that is smaller."""
    coder, parts = zstandard.ZstdCompressor(level=LEVEL, write_content_size=False), list[bytes]()
    for stream in streams:
        own = stream.tobytes()
        small = coder.compress(own) if len(own) > 32 else own
        chosen = small if len(small) < len(own) else own
        parts += [_length(len(own)), _length(len(own) - len(chosen)), chosen]
    return b"".join(parts)


def unpacked(data: bytes, count: int) -> list[Bytes]:
    """Return the streams of ``packed``.

    Raises:
        WeightError: there are not ``count`` whole streams, and nothing else.
    """
    coder, streams, start = zstandard.ZstdDecompressor(), list[Bytes](), 0
    try:
        for _ in range(count):
            length, start = _read_length(data, start)
            saved, start = _read_length(data, start)
            part = data[start : start + length - saved]
            start += length - saved
            own = coder.decompress(part, max_output_size=length) if saved else part
            if len(own) != length:
                raise damaged("a stream is cut off")
            streams.append(np.frombuffer(own, np.uint8))
    except (IndexError, zstandard.ZstdError) as error:
        raise damaged(str(error)) from None
    if start != len(data):
        raise damaged(f"{len(data) - start} bytes follow its end")
    return streams


def _length(value: int) -> bytes:
    """Return a length in groups of 7 bits, the lowest first."""
    groups = bytearray()
    while value > 127:
        groups.append(value % 128 + 128)
        value //= 128
    return bytes([*groups, value])


def _read_length(data: bytes, start: int) -> tuple[int, int]:
    """Return a length, and the place after it."""
    value, shift = 0, 0
    while data[start] > 127:
        value, shift, start = value + ((data[start] - 128) << shift), shift + 7, start + 1
    return value + (data[start] << shift), start + 1


def damaged(why: str) -> WeightError:
    """Return the error of a payload that cannot be read."""
    return WeightError("a payload is damaged", why=why, fix="have it sent again, as a whole tensor")
