"""Access: the token of a service, and the error of a request without it.

An address that other machines reach requires the user's own token file, so that nobody exposes a machine by
accident. Every request carries the token; an error is JSON with its three sentences.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rillflow.errors import RillflowError, StreamError
from rillflow.serving.http_body import Declined
from rillflow_service.requests import sentences

CLIENT = "x-rillflow-client"
"""Header with the client's name; the client's leases belong to this name."""
Operation = Callable[[Request], Any]


def client_of(request: Request) -> str:
    """Return the name that a client gives itself."""
    name: str = request.headers.get(CLIENT, "client")
    return name[:64]


def announced_bytes(request: Request, most: int) -> int:
    """Return the announced bytes of a body; the most that it may have if none is announced."""
    said = request.headers.get("content-length", "")
    if not said:
        return most if "transfer-encoding" in request.headers else 0
    return int(said) if said.isdecimal() and len(said) < 20 else 0


def token_for(host: str, token_file: Path | None) -> str:
    """Return the token of a service that listens on an address: the file's, else a new one.

    Raises:
        StreamError: the address is not loopback and there is no token file, or the token is too short.
    """
    if host and token_file is None and not _is_loopback(host):
        raise StreamError(
            f"{host} can be reached from other machines",
            why="such an address needs a token of your own",
            fix="add --token-file FILE (in a recipe: rollout.service.token_file)",
        )
    try:
        token = token_file.read_text().strip() if token_file else secrets.token_urlsafe(32)
    except (OSError, UnicodeDecodeError) as error:
        raise StreamError(
            f"the token file {token_file} cannot be read", why=str(error), fix="name a text file"
        ) from None
    if len(token) < 16:
        raise StreamError(f"the token has {len(token)} characters", why="a safe token has at least 16")
    return token


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def guarded(
    token: str, operation: Operation, refused: Callable[[Request, RillflowError], None] = lambda *_: None
) -> Operation:
    """Return the operation for requests with the token; errors become answers.

    Args:
        token: bearer token of every request.
        operation: answers a request.
        refused: called with every error of a request that had the token.
    """

    async def answered(request: Request) -> Response:
        said = request.headers.get("authorization", "").removeprefix("Bearer ")
        try:
            if not hmac.compare_digest(said.encode(), token.encode()):
                raise Declined(
                    401,
                    "the token is wrong",
                    fix="send the token of the service's token file as a bearer token",
                )
            answer: Response = await operation(request)
            return answer
        except RillflowError as error:
            status = error.status if isinstance(error, Declined) else 422
            if status != 401:
                refused(request, error)
            return JSONResponse(sentences(error), status_code=status)

    return answered
