"""Access: let only requests through that carry the token, and answer errors in one form.

?token=T on a page ─> cookie, and the same address without the token
cookie | Authorization: Bearer T | ?token=T ─> the answer          anything else ─> 401
"""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from rillflow.errors import RillflowError
from rillflow.serving.http_body import Declined
from rillflow.serving.token import Token

HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "font-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
}
"""Headers of every answer: texts of a model never run as code, and no other site sees the page."""
Handler = Callable[[Request], Awaitable[Response]]


class Access:
    """Starlette middleware that checks the token.

    Args:
        token: the token.
        port: port of the server; browsers send cookies to every port, so the cookie's name has it.
    """

    def __init__(self, token: Token, port: int) -> None:
        self._token, self._cookie = token, f"rillflow_watch_{port}"

    async def __call__(self, request: Request, answer: Handler) -> Response:
        """Answer a request, or refuse it."""
        given = request.query_params.get("token")
        if given is not None and self._token.matches(given) and not request.url.path.startswith("/api/"):
            rest = [(key, value) for key, value in request.query_params.multi_items() if key != "token"]
            path = request.url.path if request.url.path.strip("/") else "/"
            found: Response = RedirectResponse(f"{path}?{urlencode(rest)}" if rest else path, status_code=303)
            found.set_cookie(self._cookie, given, httponly=True, samesite="strict")
        elif self._is_known(request, given):
            found = await answer(request)
        else:
            found = error_response(
                Declined(
                    401,
                    "the request has no valid token",
                    why="only the person who started rillflow watch may read the runs",
                    fix="open the address that rillflow watch printed",
                )
            )
        for name, value in HEADERS.items():
            found.headers.setdefault(name, value)
        return found

    def _is_known(self, request: Request, given: str | None) -> bool:
        kind, _, bearer = request.headers.get("authorization", "").partition(" ")
        texts = [request.cookies.get(self._cookie), given]
        texts += [bearer.strip()] if kind.lower() == "bearer" else []
        return any(self._token.matches(text) for text in texts if text)


def json_response(content: Any, status: int = 200) -> Response:
    """Return an answer in JSON; NaN and infinity, which JSON lacks, are null."""
    try:
        text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(_finite(content), separators=(",", ":"))
    return Response(text.encode(), status_code=status, media_type="application/json")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value


def error_response(error: RillflowError) -> Response:
    """Return an error as the page and other clients read it."""
    told: Mapping[str, str] = {"what": error.what, "why": error.why, "fix": error.fix}
    return json_response({"error": told}, error.status if isinstance(error, Declined) else 500)
