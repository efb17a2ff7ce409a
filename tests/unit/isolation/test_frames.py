"""Frames: content arrives in any fragmentation; invalid frames are refused."""

from __future__ import annotations

import os
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rillflow.isolation.frames import FrameError, FrameReader, encode, read_frames, write_all

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)
FRAMES = st.lists(st.builds(lambda value: {"type": "x", "value": value}, JSON), max_size=4)


@settings(max_examples=60)
@given(frames=FRAMES, data=st.data())
def test_frames_survive_any_cut(frames: list[dict[str, object]], data: st.DataObject) -> None:
    sent = b"".join(encode(frame) for frame in frames)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sent)), max_size=6)))
    reader, got = FrameReader(), []
    for start, stop in zip([0, *cuts], [*cuts, len(sent)], strict=True):
        got += reader.feed(sent[start:stop])
    assert got == frames


@settings(max_examples=60)
@given(garbage=st.binary(max_size=64))
def test_garbage_is_refused_or_held(garbage: bytes) -> None:
    try:
        frames = FrameReader().feed(garbage)
    except FrameError:
        return
    assert all(isinstance(frame["type"], str) for frame in frames)


@pytest.mark.parametrize(
    "body", [b"nonsense", b"[1]", b'{"no": "type"}', b'{"type": 3}', b"\xff", b"[" * 100_000]
)
def test_a_body_that_is_no_frame_is_refused(body: bytes) -> None:
    with pytest.raises(FrameError):
        FrameReader().feed(struct.pack(">I", len(body)) + body)


def test_a_length_of_four_gigabytes_is_refused_at_once() -> None:
    with pytest.raises(FrameError, match="4294967295 bytes"):
        FrameReader().feed(b"\xff\xff\xff\xff")


def test_a_pipe_carries_frames_and_tells_its_end() -> None:
    reading, writing = os.pipe()
    write_all(writing, encode({"type": "first", "text": "\ud800 ü"}))
    write_all(writing, encode({"type": "second"})[:-1])
    os.close(writing)
    assert list(read_frames(reading)) == [{"type": "first", "text": "\ud800 ü"}]
    os.close(reading)
