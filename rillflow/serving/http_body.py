"""HTTP body: read a request's body within limits of size and time, and validate what it says.

    head ─ size announced ─> body_of: bytes, in time ─> request_json ─> checked_request ─> the request

``RequestReader`` does this for an application, within limits for all of its requests together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from rillflow.errors import StreamError
from rillflow.serving.request_json import brief, json_object

__all__ = ["Declined", "body_of", "checked_request", "json_object"]

BODY_WITHIN_S = 30.0
SLOWEST_BYTES_S = 2**20
"""A body must arrive within 30 s, plus one second for each announced MiB."""
SMALL_BYTES = 2**14
"""Bodies up to this size need no room of their own: their sum is bounded by the number of connections."""
_BRANCHES = frozenset({"str", "int", "float", "bool", "none", "dict", "list", "nullable", "constrained-str"})
R = TypeVar("R", bound=BaseModel)


class Declined(StreamError):
    """An error with its own HTTP status."""

    def __init__(self, status: int, what: str, why: str = "", fix: str = "") -> None:
        super().__init__(what, why, fix)
        self.status = status


async def body_of(
    request: Request, most: int, make_room: Callable[[int], Awaitable[None]] | None = None
) -> bytearray:
    """Read a request's body.

    Args:
        request: the request.
        most: largest number of bytes.
        make_room: called with the largest size that the body may have, before more than ``SMALL_BYTES`` of
            it are read.

    Raises:
        Declined: it is longer than ``most`` bytes, is compressed, or does not arrive in time.
    """
    coding = request.headers.get("content-encoding", "identity")
    if coding.lower() != "identity":
        why = "a small compressed body can stand for one of any size"
        raise Declined(415, f"the body is compressed: {coding[:20]}", why=why, fix="send it as it is")
    announced = request.headers.get("content-length", "0")
    body = bytearray()
    too_long = Declined(413, f"a body of {announced[:20]} bytes", why=f"the limit is {most}", fix="send less")
    if not announced.isdecimal() or len(announced) > 20 or int(announced) > most:
        raise too_long
    within_s = BODY_WITHIN_S + int(announced) / SLOWEST_BYTES_S
    try:
        async with asyncio.timeout(within_s):
            async for piece in request.stream():
                if make_room is not None and len(body) <= SMALL_BYTES < len(body) + len(piece):
                    await make_room(int(announced) or most)
                body += piece
                if len(body) > most:
                    raise too_long
    except (TimeoutError, ClientDisconnect):
        what = f"only {len(body)} of the body's {announced} bytes arrived"
        raise Declined(408, what, why=f"the timeout is {within_s:g} s", fix="send it again") from None
    return body


def checked_request(kind: type[R], says: Mapping[str, Any]) -> R:
    """Validate a request.

    Raises:
        StreamError: a value is invalid; the message names the first.
    """
    try:
        return kind.model_validate(says)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False)
        of_first = [each for each in found if each["loc"][:1] == found[0]["loc"][:1]]
        deepest = max(of_first, key=lambda each: len(_place(each["loc"])))
        place = ".".join(_place(deepest["loc"]))
        raise StreamError(f"{place} is {brief(deepest['input'])}", why=deepest["msg"][:300]) from None


def _place(loc: Sequence[int | str]) -> list[str]:
    """Return the place of an error without the branches of unions."""
    return [str(part)[:80] for part in loc if not _is_branch(part)]


def _is_branch(part: int | str) -> bool:
    """Return whether a part of a place names a branch of a union, not a field."""
    return isinstance(part, str) and (part in _BRANCHES or "[" in part or "(" in part)
