"""The body of a request: a longer one has more time to arrive."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the service is the extra `service`")

from starlette.requests import Request

from rillflow.serving.http_body import Declined, body_of


@pytest.mark.parametrize(("announced", "within_s"), [(0, 30), (2**20, 31), (2**23, 38)])
def test_a_body_has_30_seconds_and_one_more_for_each_announced_mib(announced: int, within_s: int) -> None:
    async def leave() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    headers = [(b"content-length", str(announced).encode())]
    request = Request({"type": "http", "headers": headers}, receive=leave)
    with pytest.raises(Declined, match=f"the timeout is {within_s} s") as caught:
        asyncio.run(body_of(request, most=2**24))
    assert caught.value.status == 408
