"""App: a data plane's streams over HTTP. Each operation is a path, with a request of ``data_plane.requests``.

    POST /v1/create   JSON                      create a stream, its columns and stages  (init_engines)
    POST /v1/begin    tensors                   begin groups with their source columns   (put_prompts_data)
    POST /v1/take     JSON -> tensors, or 204   lease ready groups                       (get_experience_data)
    POST /v1/done     tensors                   write a stage's columns of groups        (put_experience_data)
    POST /v1/return, look   JSON;   /v1/drop   tensors
    PUT  /v1/weights/N/FILE      safetensors    send a file of the next version
    PUT  /v1/weights?version=N   JSON           publish its files                        (weight_sync_notify)
    GET  /v1/weights?newer_than=N&wait_s=S      -> JSON: the newest version's files, or 204
    GET  /v1/weights/N/FILE                     -> a safetensors file

Every request carries the token. An error is JSON with its three sentences. HTTP has no connection whose loss
would end a lease: a client's groups return at the lease's deadline, so a client that may be killed should
take short leases.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any, cast

from numpy.typing import NDArray
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from rillflow import __version__
from rillflow.errors import RillflowError, StreamError
from rillflow.serving.http_body import BODY_WITHIN_S, Declined, body_of, checked_request, json_object
from rillflow.workers.wire import MAX_BODY_BYTES, MAX_JSON_BYTES
from rillflow_service.access import Operation, announced_bytes, client_of, guarded
from rillflow_service.body_limit import BodyLimit
from rillflow_service.plane import Plane
from rillflow_service.requests import OF_STREAMS, Begin, Create, Done, Look, Publish, Return, Take
from rillflow_service.segments import ROWS
from rillflow_service.session import IDS, TOKENS, ids_and_tokens
from rillflow_service.tensors import decoded, encoded
from rillflow_service.weight_folder import WeightFolder

OPERATIONS = {model.__name__.lower(): model for model in OF_STREAMS}
"""Request models by path."""
WITH_TENSORS = ("begin", "done", "drop")
"""Operations whose request is in the metadata of tensors."""
TENSORS = "application/x-safetensors"
MAX_WEIGHT_BYTES = 2**36
MAX_PUBLISH_BYTES = 2**19
_FILE = "/v1/weights/{version:int}/{file}"


class Service:
    """HTTP handlers of the operations.

    Args:
        plane: the data plane of the streams.
        token: bearer token of every request.
        folder: folder of the streams' settings and of the weights; what is there is served again.
        max_weight_bytes: largest size of a version of the weights.
    """

    def __init__(
        self, plane: Plane, *, token: str, folder: Path, max_weight_bytes: int = MAX_WEIGHT_BYTES
    ) -> None:
        self._plane = plane
        self._token = token
        self._numbers = count()
        self._streams = folder / "streams.json"
        self._created: dict[str, dict[str, Any]] = {}
        self._weights = WeightFolder(folder / "weights", most_bytes=max_weight_bytes)
        self._published = asyncio.Condition()
        self._writing = asyncio.Lock()
        size = plane.store.capacity_bytes
        self._limits = {"begin": BodyLimit(size), "done": BodyLimit(size), "drop": BodyLimit(size)}
        for name, kept in (json.loads(self._streams.read_text()) if self._streams.exists() else {}).items():
            self._plane.create(Create.model_validate(kept["request"]), kept["owner"])
            self._created[name] = kept

    def app(self) -> Starlette:
        """Return the ASGI application."""
        routes = [Route(f"/v1/{name}", self._guarded(self.operate), methods=["POST"]) for name in OPERATIONS]
        for path, method, operation in (
            ("/v1/weights", "PUT", self.put_weights),
            ("/v1/weights", "GET", self.get_weights),
            (_FILE, "PUT", self.put_file),
            (_FILE, "GET", self.get_file),
        ):
            routes.append(Route(path, self._guarded(operation), methods=[method]))
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
        if name not in WITH_TENSORS:
            says = json_object(await body_of(request, MAX_JSON_BYTES))
            return await self._operate(request, name, says, {})
        most = min(MAX_BODY_BYTES, self._plane.store.capacity_bytes)
        async with self._limits[name].room(announced_bytes(request, most)):
            says, arrays = decoded(await body_of(request, most))
            return await self._operate(request, name, says, arrays)

    async def _operate(
        self, request: Request, name: str, says: dict[str, Any], arrays: dict[str, NDArray[Any]]
    ) -> Response:
        asked, client = checked_request(OPERATIONS[name], says), client_of(request)
        ids, tokens = ids_and_tokens(arrays)
        holder = f"{client}#{next(self._numbers)}" if name == "begin" else client
        self._check_version(asked)
        try:
            asked = await self._plane.keep(asked, arrays, holder)
            answer = await self._answer(request, asked, ids, tokens, holder)
            self._remember(asked, client)
            return answer
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

    def _check_version(self, asked: BaseModel) -> None:
        """Raise Declined unless the policy version of rows was published; version 0 is there before."""
        version = asked.version if isinstance(asked, Begin | Done) else None
        newest = max(self._weights.version, 0)
        if version is not None and not 0 <= version <= newest:
            raise Declined(
                422,
                f"rows of version {version}",
                why=f"versions 0 to {newest} were published",
                fix="send the version of the weights that sampled the rows",
            )

    def _remember(self, asked: BaseModel, client: str) -> None:
        """Keep the open streams in the folder, for a service that starts there again."""
        if isinstance(asked, Create) and asked.stream not in self._created:
            self._created[asked.stream] = {"request": asked.model_dump(mode="json"), "owner": client}
        elif isinstance(asked, Look) and asked.action == "close" and asked.stream in self._created:
            del self._created[asked.stream]
        else:
            return
        written = self._streams.with_suffix(".part")
        written.write_text(json.dumps(self._created))
        written.replace(self._streams)

    async def put_file(self, request: Request) -> Response:
        """Store a file of the next version."""
        version, name = request.path_params["version"], request.path_params["file"]
        size = await self._weights.receive(version, name, _steady(request.stream()))
        return JSONResponse({"bytes": size})

    async def put_weights(self, request: Request) -> Response:
        """Publish the files of the next version, and wake the clients that wait for them."""
        version = _number(request, "version")
        asked = checked_request(Publish, json_object(await body_of(request, MAX_PUBLISH_BYTES)))
        async with self._writing:
            await asyncio.to_thread(self._weights.publish, version, asked.files)
        async with self._published:
            self._published.notify_all()
        return JSONResponse({"version": version})

    async def get_weights(self, request: Request) -> Response:
        """Return the files of the newest version if it is newer than a version; wait for it otherwise."""
        newer_than, wait_s = _number(request, "newer_than", -1), min(_number(request, "wait_s", 0), 600)
        try:
            async with asyncio.timeout(wait_s), self._published:
                await self._published.wait_for(lambda: self._weights.version > newer_than)
        except TimeoutError:
            return Response(status_code=204)
        return JSONResponse(self._weights.manifest(newer_than))

    async def get_file(self, request: Request) -> Response:
        """Return a file of a version."""
        path = self._weights.path(request.path_params["version"], request.path_params["file"])
        return FileResponse(path, media_type="application/octet-stream")

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
    answers = {"200": {"description": "done"}, **dict.fromkeys(("401", "408", "413", "422", "503"), error)}
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
    paths |= _weight_paths(answers, maybe, error)
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


def _weight_paths(answers: dict[str, Any], maybe: dict[str, Any], error: dict[str, Any]) -> dict[str, Any]:
    query = [
        {"name": name, "in": "query", "schema": {"type": "integer"}}
        for name in ("version", "newer_than", "wait_s")
    ]
    at = [
        {"name": "version", "in": "path", "required": True, "schema": {"type": "integer"}},
        {"name": "file", "in": "path", "required": True, "schema": {"type": "string"}},
    ]
    listed = {"content": {"application/json": {"schema": Publish.model_json_schema()}}, "required": True}
    sent = {"content": {TENSORS: {"schema": {}}}, "required": True}
    return {
        "/v1/weights": {
            "put": {
                "summary": "Publish the files of the next version.",
                "parameters": query[:1],
                "requestBody": listed,
                "responses": {**answers, "409": error},
            },
            "get": {
                "summary": "Return the files of the newest version.",
                "parameters": query[1:],
                "responses": maybe,
            },
        },
        "/v1/weights/{version}/{file}": {
            "put": {
                "summary": "Send a file of the next version.",
                "parameters": at,
                "requestBody": sent,
                "responses": {**answers, "404": error, "409": error},
            },
            "get": {
                "summary": "Return a file.",
                "parameters": at,
                "responses": {**answers, "404": error, "410": error},
            },
        },
    }


async def _steady(body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the parts of a body of any size; each must arrive in time.

    Raises:
        Declined: one does not.
    """
    while True:
        try:
            async with asyncio.timeout(BODY_WITHIN_S):
                part = await anext(body, None)
        except (TimeoutError, ClientDisconnect):
            what = "the body of a weight file ended early"
            raise Declined(
                408, what, why=f"no byte came for {BODY_WITHIN_S:g} s, or the client left"
            ) from None
        if part is None:
            return
        yield part


def _number(request: Request, name: str, default: int | None = None) -> int:
    said = request.query_params.get(name, "" if default is None else str(default))
    if not said.removeprefix("-").isdecimal() or len(said) > 12:
        raise StreamError(f"{name} is {said[:80]!r}", why="it must be a whole number")
    return int(said)
