"""HttpApp: what the stand-alone service and the engine of a run share: token, errors, waits, weights to read.

    request ─ token? ─> operation ─> answer, or the three sentences of an error as JSON
    GET /v1/weights?newer_than=N&wait_s=S     files of the newest version, or 204
    GET /v1/weights/VERSION/FILE              a safetensors file

A client that waits looks again when ``ring`` was called, and every LOOK_S.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, ClassVar, cast

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from rillflow.errors import RillflowError, StreamError
from rillflow.serving.http_body import Declined
from rillflow.serving.request_reader import HeldRoom, RequestReader
from rillflow_service.requests import sentences
from rillflow_service.weight_folder import WeightFolder

CLIENT = "x-rillflow-client"
"""Header with the client's name; the client's leases belong to this name."""
FILE = "/v1/weights/{version:int}/{file}"
LOOK_S = 0.5
"""Longest time between two looks of a waiting client; leases that end ring no bell."""
Operation = Callable[[Request], Awaitable[Response]]


class HttpApp:
    """An application whose operations need a token.

    Args:
        token: bearer token of every request.
        weights: weights to read.
        reader: reads the bodies of requests.
    """

    paths: ClassVar[str]
    """Paths that the application has, for the error of another path."""
    page: ClassVar[str]
    """Where the paths are described."""
    longest_wait_s: ClassVar[int]
    """Longest wait of a client in seconds."""

    def __init__(self, token: str, weights: WeightFolder, reader: RequestReader) -> None:
        self._token, self._weights, self._reader = token, weights, reader
        self._routes: list[Route] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._bell = asyncio.Event()
        self.route("GET", "/v1/weights", self._newest_weights)
        self.route("GET", FILE, self._weight_file)

    @property
    def is_over(self) -> bool:
        """Whether nothing will come any more that a waiting client could wait for."""
        return False

    def route(self, method: str, path: str, operation: Operation) -> None:
        """Answer requests of a path by an operation."""
        self._routes.append(Route(path, self._guarded(operation), methods=[method]))

    def app(self) -> Starlette:
        """Return the ASGI application."""
        refuse = self._guarded(self._refuse)

        async def unknown(request: Request, error: Exception) -> Response:
            del error
            return await refuse(request)

        return Starlette(
            routes=self._routes,
            middleware=[Middleware(HeldRoom)],
            lifespan=self._living,
            exception_handlers={404: unknown, 405: unknown},
        )

    def ring(self) -> None:
        """Wake the waiting clients; from any thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._bell.set)

    async def found(self, look: Callable[[], Any], wait_s: float, request: Request) -> Any:
        """Return what ``look`` finds; look again until the time is over or the client left, then None."""
        loop = asyncio.get_running_loop()
        until = loop.time() + wait_s
        while True:
            self._bell.clear()
            left = min(LOOK_S, until - loop.time())
            if (found := look()) is not None or left <= 0 or self.is_over:
                return found
            with suppress(TimeoutError):
                await asyncio.wait_for(self._bell.wait(), left)
            if await request.is_disconnected():
                return None

    def refused(self, request: Request, error: RillflowError) -> None:
        """Take note of an error of a request that had the token."""

    async def _newest_weights(self, request: Request) -> Response:
        newer_than = whole(request, "newer_than", -1)
        wait_s = min(whole(request, "wait_s", 0), self.longest_wait_s)
        found = await self.found(lambda: self._weights.manifest(newer_than), wait_s, request)
        return Response(status_code=204) if found is None else JSONResponse(found)

    async def _weight_file(self, request: Request) -> Response:
        path = self._weights.path(request.path_params["version"], request.path_params["file"])
        return FileResponse(path, media_type="application/octet-stream")

    async def _refuse(self, request: Request) -> Response:
        what = f"there is no endpoint {request.method} {request.url.path[:80]}"
        raise Declined(404, what, why=self.paths, fix=f"read {self.page}")

    def _guarded(self, operation: Operation) -> Operation:
        """Return the operation for requests with the token; errors become answers."""

        async def answered(request: Request) -> Response:
            said = request.headers.get("authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(said.encode(), self._token.encode()):
                fix = "send the token of the service's token file as a bearer token"
                return _told(Declined(401, "the token is wrong", fix=fix))
            try:
                return await operation(request)
            except RillflowError as error:
                self.refused(request, error)
                return _told(error)

        return answered

    @asynccontextmanager
    async def _living(self, app: Starlette) -> AsyncIterator[None]:
        del app
        self._loop = asyncio.get_running_loop()
        yield


def _told(error: RillflowError) -> Response:
    return JSONResponse(sentences(error), status_code=error.status if isinstance(error, Declined) else 422)


def client_of(request: Request) -> str:
    """Return the name that a client gives itself."""
    return cast(str, request.headers.get(CLIENT, "client"))[:64]


def announced_bytes(request: Request, most: int) -> int:
    """Return the announced bytes of a body; the most that it may have if none is announced."""
    said = request.headers.get("content-length", "")
    if not said:
        return most if "transfer-encoding" in request.headers else 0
    return int(said) if said.isdecimal() and len(said) < 20 else 0


def whole(request: Request, name: str, default: int | None = None) -> int:
    """Return a whole number of the query.

    Raises:
        StreamError: it is none, or missing without a default.
    """
    said = request.query_params.get(name, "" if default is None else str(default))
    if not said.removeprefix("-").isdecimal() or len(said) > 12:
        raise StreamError(f"{name} is {said[:80]!r}", why="it must be a whole number")
    return int(said)
