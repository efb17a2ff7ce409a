"""The wire: written messages are read back, and nothing else is accepted."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from rillflow.workers.wire import (
    ALIGNMENT,
    ARRAY_TYPES,
    HEAD_BYTES,
    WireError,
    head_of,
    message_of,
    packed,
)

TYPES = st.sampled_from(ARRAY_TYPES).flatmap(
    lambda name: arrays(name, array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5))
)


def read(data: bytes | bytearray) -> Any:
    head = head_of(data)
    text = data[HEAD_BYTES : HEAD_BYTES + head.json_bytes]
    return message_of(head, text, memoryview(data)[head.body_at : head.body_at + head.body_bytes])


@settings(max_examples=25)
@given(
    st.dictionaries(st.text(max_size=3), TYPES, max_size=4),
    st.dictionaries(st.text(max_size=3), st.integers()),
)
def test_a_frame_is_read_as_it_was_written(found: dict[str, Any], says: dict[str, int]) -> None:
    says.pop("arrays", None)
    frame = packed(7, says, found, number=3)
    data = bytearray(frame.nbytes)
    frame.write_into(data)
    message = read(data)
    assert (message.kind, message.says, list(message.arrays)) == (7, says, list(found))
    for name, array in found.items():
        assert message.arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(message.arrays[name], array)


def test_the_layout_is_the_documented_one() -> None:
    frame = packed(2, {"a": 1}, {"x": np.arange(3, dtype=np.int16), "y": np.ones(2, np.float32)}, number=5)
    data = bytearray(frame.nbytes)
    frame.write_into(data)
    text = b'{"a":1,"arrays":[["x","int16",[3],0],["y","float32",[2],64]]}'
    assert data[:24] == b"RILL" + struct.pack("<HHIIQ", 1, 2, 5, len(text), 128)
    assert data[64 : 64 + len(text)] == text
    body = data[128:]
    assert body[:6] == struct.pack("<3h", 0, 1, 2) and body[64:72] == struct.pack("<2f", 1, 1)
    assert len(body) == 128 and all(place % ALIGNMENT == 0 for place, _ in frame.places)


@given(st.binary(max_size=300), st.integers(0, 200), st.binary(min_size=1, max_size=40))
def test_any_bytes_are_a_frame_or_a_wire_error(junk: bytes, at: int, patch: bytes) -> None:
    frame = packed(1, {"stream": "s"}, {"x": np.arange(9), "y": np.zeros((2, 2), np.float16)})
    good = bytearray(frame.nbytes)
    frame.write_into(good)
    good[at : at + len(patch)] = patch
    for data in (junk.ljust(HEAD_BYTES, b"\0"), good):
        try:
            message = read(data)
        except WireError as error:
            assert error.what
        else:
            assert all(array.nbytes <= len(data) for array in message.arrays.values())


@pytest.mark.parametrize(
    ("at", "put", "said"),
    [
        (0, b"HTTP", "begins with b'HTTP'"),
        (4, struct.pack("<H", 2), "of version 2"),
        (12, struct.pack("<I", 2**16 + 1), "65537 bytes of JSON"),
        (16, struct.pack("<Q", 4 * 2**30), "4294967296 bytes of arrays"),
    ],
)
def test_a_head_that_announces_what_cannot_be_is_refused_before_anything_is_read(
    at: int, put: bytes, said: str
) -> None:
    head = bytearray(packed(1, {}).front[:HEAD_BYTES])
    head[at : at + len(put)] = put
    with pytest.raises(WireError, match=said):
        head_of(head)
    with pytest.raises(WireError, match="received frame 0 instead of 1"):
        head_of(packed(1, {}).front, number=1)


@pytest.mark.parametrize(
    "row",
    [
        '["x","int64",[2],64]',
        '["x","int64",[10],0]',
        '["x","int64",[1],8]',
        '["x","int64",[1],-64]',
        '["x","object",[1],0]',
        '["x","int64",[-1],0]',
        '["x","int64",[true],0]',
        '["x","int64",[1e3],0]',
        '["x","int64",[1073741824,1073741824,1073741824],0]',
        '["x","int64",[1],0],["x","int64",[0],64]',
        '["x","int64",[1],0],["y","int64",[1],0]',
        '["x","int64",[1,1,1,1,1,1,1,1,1],0]',
        "7",
    ],
)
def test_arrays_that_lie_about_their_place_are_refused(row: str) -> None:
    head = head_of(packed(1, {}).front)
    with pytest.raises(WireError):
        message_of(head, f'{{"arrays":[{row}]}}'.encode(), bytes(72))


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b'{"arrays":{}}', b"\xff", b"[" * 10**5])
def test_json_that_is_no_frame_s_is_refused(text: bytes) -> None:
    with pytest.raises(WireError):
        message_of(head_of(packed(1, {}).front), text, b"")


def test_a_type_that_no_frame_has_is_refused_where_it_is_written() -> None:
    with pytest.raises(WireError, match="complex64"):
        packed(1, {}, {"x": np.zeros(1, np.complex64)})
