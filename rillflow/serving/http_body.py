"""HTTP body: read and check a request's body within limits of size, depth and time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from rillflow.errors import StreamError

BODY_WITHIN_S = 30.0
SLOWEST_BYTES_S = 2**20
"""A body must arrive within 30 s, plus one second for each announced MiB."""
MAX_JSON_DEPTH = 64
"""Largest nesting depth of objects and lists in a request."""


R = TypeVar("R", bound=BaseModel)


class Declined(StreamError):
    """An error with its own HTTP status."""

    def __init__(self, status: int, what: str, why: str = "", fix: str = "") -> None:
        super().__init__(what, why, fix)
        self.status = status


async def body_of(request: Request, most: int) -> bytearray:
    """Read a request's body.

    Raises:
        Declined: it is longer than ``most`` bytes, or does not arrive in time.
    """
    announced = request.headers.get("content-length", "0")
    body = bytearray()
    too_long = Declined(413, f"a body of {announced[:20]} bytes", why=f"the limit is {most}", fix="send less")
    if not announced.isdecimal() or len(announced) > 20 or int(announced) > most:
        raise too_long
    within_s = BODY_WITHIN_S + int(announced) / SLOWEST_BYTES_S
    try:
        async with asyncio.timeout(within_s):
            async for piece in request.stream():
                body += piece
                if len(body) > most:
                    raise too_long
    except (TimeoutError, ClientDisconnect):
        what = f"only {len(body)} of the body's {announced} bytes arrived"
        raise Declined(408, what, why=f"the timeout is {within_s:g} s", fix="send it again") from None
    return body


def json_object(body: bytearray) -> dict[str, Any]:
    """Parse a body.

    Raises:
        StreamError: it is not a JSON object, is nested too deeply, or has a text that is not Unicode.
    """
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise StreamError(f"the request is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise StreamError("the request is not a JSON object")
    _check_json(found)
    return found


def _check_json(found: dict[str, Any]) -> None:
    """Raise StreamError for deep nesting and for texts that UTF-8 cannot encode."""
    level: list[Any] = [found]
    for _ in range(MAX_JSON_DEPTH):
        if not level:
            return
        inner = [part for each in level for part in (each.values() if isinstance(each, dict) else each)]
        texts = [part for part in inner if isinstance(part, str)]
        texts += [key for each in level if isinstance(each, dict) for key in each]
        for text in texts:
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise StreamError(
                    f"a string of the request has U+{ord(text[error.start]):04X} at index {error.start}",
                    why="half of a surrogate pair is not a character",
                    fix="send the whole character, as UTF-8 or as both halves",
                ) from None
        level = [part for part in inner if isinstance(part, dict | list)]
    if level:
        raise StreamError(
            f"the request is nested deeper than {MAX_JSON_DEPTH} levels", why=f"the limit is {MAX_JSON_DEPTH}"
        )


def checked_request(kind: type[R], says: Mapping[str, Any]) -> R:
    """Validate a request.

    Raises:
        StreamError: a value is invalid; the message names the first.
    """
    try:
        return kind.model_validate(says)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise StreamError(f"{place} is {str(first['input'])[:80]}", why=first["msg"]) from None
