"""Bodies that arrive at once: their bytes and their time are limited."""

from __future__ import annotations

import asyncio
import struct
from pathlib import Path

import numpy as np
import pytest

from plugins.service.tests.test_bad_frames import answer, connected, frame
from rillflow.serving import body_limit
from rillflow.serving.body_limit import BodyLimit
from rillflow.serving.http_body import SMALL_BYTES, Declined
from rillflow_service.client import Client
from rillflow_service.requests import Kind

SIZE = 2 * SMALL_BYTES


def test_a_body_waits_for_the_room_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_limit, "BODY_WITHIN_S", 0.2)

    async def run() -> list[str]:
        room, told, left = BodyLimit(SIZE), list[str](), asyncio.Event()

        async def first() -> None:
            async with room.room(SIZE):
                told.append("first")
                await left.wait()

        holding = asyncio.ensure_future(first())
        await asyncio.sleep(0)
        with pytest.raises(Declined, match="no room for a body") as caught:
            async with room.room(SIZE):
                told.append("too early")
        assert caught.value.status == 503 and f"{SIZE} of {SIZE} bytes" in caught.value.why
        async with room.room(SMALL_BYTES):
            told.append("small")
        left.set()
        async with room.room(SIZE):
            told.append("second")
        await holding
        assert room.used_bytes == 0
        with pytest.raises(Declined, match="a body of 999999 bytes"):
            async with room.room(999_999):
                pass
        return told

    assert asyncio.run(run()) == ["first", "small", "second"]


@pytest.mark.slow
def test_frames_that_never_end_are_ended_and_hold_bounded_memory(folder: Path) -> None:
    """Each announces 12 MiB to a store of 16, so one is read at a time; a good client goes on beside them."""
    head = bytearray(frame(Kind.BEGIN, {"stream": "s"}, 1, x=np.zeros(9)))
    struct.pack_into("<Q", head, 16, 12 * 2**20)
    ends = [connected(folder) for _ in range(3)]
    for end in ends:
        assert answer(end) is not None
        end.settimeout(120.0)
        end.sendall(head)
    client = Client(folder, name="witness")
    with pytest.raises(Exception, match="no stream"):
        client.status("nosuch")
    for end in ends:
        found = answer(end)
        assert found is not None and found.kind == Kind.ERROR
        assert "is not whole" in found.says["what"] or "no room" in found.says["what"]
        assert answer(end) is None
        end.close()
