"""App: a data plane's streams over HTTP. Each operation is a path, with a request of ``data_plane.requests``.

    POST /v1/create   JSON                      create a stream, its columns and stages  (init_engines)
    POST /v1/begin    tensors                   begin groups with their source columns   (put_prompts_data)
    POST /v1/take     JSON -> tensors, or 204   lease ready groups                       (get_experience_data)
    POST /v1/done     tensors                   write a stage's columns of groups        (put_experience_data)
    POST /v1/return, look   JSON;   /v1/drop   tensors
    PUT  /v1/weights?version=N   tensors        publish weights                          (weight_sync_notify)
    GET  /v1/weights?newer_than=N&wait_s=S      -> tensors, or 204

Every request carries the token. An error is JSON with its three sentences. HTTP has no connection whose loss
would end a lease: a client's groups return at the lease's deadline, so a client that may be killed should
take short leases.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any, cast

from numpy.typing import NDArray
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rillflow import __version__
from rillflow.errors import RillflowError, StreamError
from rillflow.serving.http_body import Declined, body_of, checked_request, json_object
from rillflow.workers.wire import MAX_BODY_BYTES, MAX_JSON_BYTES
from rillflow_service.access import Operation, client_of, guarded
from rillflow_service.plane import Plane
from rillflow_service.requests import OF_STREAMS, Begin, Return, Take
from rillflow_service.segments import ROWS
from rillflow_service.session import IDS, TOKENS, ids_and_tokens
from rillflow_service.tensors import decoded, encoded

OPERATIONS = {model.__name__.lower(): model for model in OF_STREAMS}
"""Request models by path."""
WITH_TENSORS = ("begin", "done", "drop")
"""Operations whose request is in the metadata of tensors."""
TENSORS = "application/x-safetensors"


class Service:
    """HTTP handlers of the operations.

    Args:
        plane: the data plane of the streams.
        token: bearer token of every request.
        max_body_bytes: largest body of a request; a longer one is refused by its announced length.
    """

    def __init__(self, plane: Plane, *, token: str, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self._plane = plane
        self._token = token
        self._max_body_bytes = max_body_bytes
        self._numbers = count()
        self._weights: tuple[int, bytes] = (-1, b"")
        self._published = asyncio.Condition()

    def app(self) -> Starlette:
        """Return the ASGI application."""
        routes = [Route(f"/v1/{name}", self._guarded(self.operate), methods=["POST"]) for name in OPERATIONS]
        routes.append(Route("/v1/weights", self._guarded(self.put_weights), methods=["PUT"]))
        routes.append(Route("/v1/weights", self._guarded(self.get_weights), methods=["GET"]))
        routes.append(Route("/openapi.json", self._guarded(self.describe), methods=["GET"]))
        refuse = self._guarded(self.refuse)

        async def unknown(request: Request, error: Exception) -> Response:
            del error
            return cast(Response, await refuse(request))

        return Starlette(
            routes=routes, lifespan=self._living, exception_handlers={404: unknown, 405: unknown}
        )

    async def operate(self, request: Request) -> Response:
        """Run one operation."""
        name = request.url.path.rpartition("/")[2]
        body = await body_of(request, self._max_body_bytes if name in WITH_TENSORS else MAX_JSON_BYTES)
        if name in WITH_TENSORS:
            says, arrays = decoded(body)
        else:
            says, arrays = json_object(body), {}
        asked = checked_request(OPERATIONS[name], says)
        client = client_of(request)
        ids, tokens = ids_and_tokens(arrays)
        holder = f"{client}#{next(self._numbers)}" if name == "begin" else client
        try:
            asked = await self._plane.keep(asked, arrays, holder)
            return await self._answer(request, asked, ids, tokens, holder)
        except RillflowError:
            await self._plane.give_up(holder)
            raise

    async def _answer(
        self, request: Request, asked: BaseModel, ids: NDArray[Any], tokens: NDArray[Any] | None, holder: str
    ) -> Response:
        match asked:
            case Begin():
                return JSONResponse({"ids": (await self._plane.begin(asked, tokens, holder)).tolist()})
            case Take():
                return await self._grant(request, asked, holder)
        return JSONResponse(await self._plane.answer(asked, ids, tokens, holder))

    async def _grant(self, request: Request, asked: Take, holder: str) -> Response:
        lease = await self._plane.take(asked, holder)
        if lease is not None and await request.is_disconnected():
            self._plane.give_back(Return(stream=asked.stream, lease=lease.number), holder)
            lease = None
        if lease is None:
            return Response(status_code=204)
        found: dict[str, NDArray[Any]] = {IDS: lease.ids, ROWS: lease.rows, TOKENS: lease.tokens}
        halves: set[str] = set()
        for cells in self._plane.located(asked.stream, lease):
            names = [*cells.columns]
            found |= self._plane.store.gathered(names, cells.cells[:, 1], cells.cells[:, 2])
            halves |= {name for name, column in cells.columns.items() if column.dtype == "bfloat16"}
        says = {"stream": asked.stream, "stage": asked.stage, "lease": lease.number}
        return Response(encoded(says, found, frozenset(halves)), media_type=TENSORS)

    async def put_weights(self, request: Request) -> Response:
        """Store weights of a newer version and wake the clients that wait for them."""
        version = _number(request, "version")
        body = await body_of(request, self._max_body_bytes)
        decoded(body)
        if version <= self._weights[0]:
            raise Declined(
                409,
                f"weights of version {version} are not new",
                why=f"version {self._weights[0]} is published",
            )
        async with self._published:
            self._weights = (version, bytes(body))
            self._published.notify_all()
        return JSONResponse({"version": version})

    async def get_weights(self, request: Request) -> Response:
        """Return the newest weights if they are newer than a version; wait for them otherwise."""
        newer_than, wait_s = _number(request, "newer_than", -1), min(_number(request, "wait_s", 0), 600)
        try:
            async with asyncio.timeout(wait_s), self._published:
                await self._published.wait_for(lambda: self._weights[0] > newer_than)
        except TimeoutError:
            return Response(status_code=204)
        version, body = self._weights
        return Response(body, media_type=TENSORS, headers={"x-rillflow-version": str(version)})

    async def refuse(self, request: Request) -> Response:
        """Refuse an unknown path or method."""
        raise Declined(
            404,
            f"there is no endpoint {request.method} {request.url.path[:80]}",
            why=f"this service speaks v1: {', '.join(OPERATIONS)}, weights",
            fix="read /openapi.json; update a client of another version",
        )

    async def describe(self, request: Request) -> Response:
        """Return the OpenAPI document."""
        del request
        return JSONResponse(openapi())

    @asynccontextmanager
    async def _living(self, app: Starlette) -> AsyncIterator[None]:
        del app
        expiring = asyncio.ensure_future(self._plane.expire())
        yield
        expiring.cancel()

    def _guarded(self, operation: Operation) -> Operation:
        return guarded(self._token, operation)


def openapi() -> dict[str, Any]:
    """Return the OpenAPI document, generated from the request models."""
    error = {
        "description": "the error, its reason and a fix",
        "content": {"application/json": {}},
    }
    answers = {"200": {"description": "done"}, **dict.fromkeys(("401", "408", "413", "422"), error)}
    maybe = {**answers, "204": {"description": "the stream has ended, or nothing newer came in time"}}
    paths: dict[str, Any] = {}
    for name, model in OPERATIONS.items():
        schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
        schema.pop("$defs", None)
        kind = TENSORS if name in WITH_TENSORS else "application/json"
        told = model.__doc__ or ""
        if name in WITH_TENSORS:
            told += " The JSON is in the metadata under 'request'; tensors are columns, .rows, .tokens, .ids."
        content = {kind: {"schema": schema}}
        paths[f"/v1/{name}"] = {
            "post": {
                "summary": told,
                "requestBody": {"content": content, "required": True},
                "responses": maybe if model is Take else answers,
            }
        }
    query = [
        {"name": name, "in": "query", "schema": {"type": "integer"}}
        for name in ("version", "newer_than", "wait_s")
    ]
    paths["/v1/weights"] = {
        "put": {
            "summary": "Publish the weights of a version.",
            "parameters": query[:1],
            "requestBody": {"content": {TENSORS: {"schema": {}}}, "required": True},
            "responses": {**answers, "409": error},
        },
        "get": {"summary": "Return the newest weights.", "parameters": query[1:], "responses": maybe},
    }
    defs: dict[str, Any] = {}
    for model in OPERATIONS.values():
        defs |= model.model_json_schema(ref_template="#/components/schemas/{model}").get("$defs", {})
    return {
        "openapi": "3.1.0",
        "info": {"title": "Rillflow streams", "version": __version__},
        "paths": paths,
        "components": {"schemas": defs, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
        "security": [{"token": []}],
    }


def _number(request: Request, name: str, default: int | None = None) -> int:
    said = request.query_params.get(name, "" if default is None else str(default))
    if not said.removeprefix("-").isdecimal() or len(said) > 12:
        raise StreamError(f"{name} is {said[:80]!r}", why="it must be a whole number")
    return int(said)
