"""StreamsApp: a data plane's streams over HTTP. Each operation is a path, with a request of ``requests``.

    POST /v1/create   JSON                      create a stream, its columns and stages  (init_engines)
    POST /v1/begin    tensors                   begin groups with their source columns   (put_prompts_data)
    POST /v1/take     JSON -> tensors, or 204   lease ready groups                       (get_experience_data)
    POST /v1/done     tensors                   write a stage's columns of groups        (put_experience_data)
    POST /v1/return, look   JSON;   /v1/drop   tensors
    PUT  /v1/weights/N/FILE      safetensors    send a file of the next version
    PUT  /v1/weights?version=N   JSON           publish its files                        (weight_sync_notify)
    GET  /v1/weights, /v1/weights/N/FILE        the newest version: see HttpApp

HTTP has no connection whose loss would end a lease: a client's groups return at the lease's deadline, so a
client that may be killed should take short leases.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from rillflow.runs.durable import replace
from rillflow.serving.body_limit import BodyLimit
from rillflow.serving.http_body import BODY_WITHIN_S, Declined, body_of, checked_request, json_object
from rillflow.serving.request_reader import RequestReader
from rillflow.workers.wire import MAX_BODY_BYTES, MAX_JSON_BYTES, Message
from rillflow_service.http_app import FILE, HttpApp, announced_bytes, client_of, whole
from rillflow_service.openapi import OPERATIONS, TENSORS, WITH_TENSORS, openapi
from rillflow_service.plane import Plane
from rillflow_service.requests import (
    CELLS,
    IDS,
    ROWS,
    TOKENS,
    Begin,
    Create,
    Done,
    Kind,
    Look,
    Publish,
    Return,
    Take,
)
from rillflow_service.session import Session, parsed
from rillflow_service.tensors import decoded, encoded
from rillflow_service.weight_folder import WeightFolder

MAX_WEIGHT_BYTES = 2**36
MAX_PUBLISH_BYTES = 2**19


class StreamsApp(HttpApp):
    """HTTP handlers of the operations.

    Args:
        plane: the data plane of the streams.
        token: bearer token of every request.
        folder: folder of the streams' settings and of the weights; what is there is served again.
        max_weight_bytes: largest size of a version of the weights.
    """

    paths = f"this service speaks v1: {', '.join(OPERATIONS)}, weights"
    page = "/openapi.json; update a client of another version"
    longest_wait_s = 600

    def __init__(
        self, plane: Plane, *, token: str, folder: Path, max_weight_bytes: int = MAX_WEIGHT_BYTES
    ) -> None:
        weights = WeightFolder(folder / "weights", most_bytes=max_weight_bytes)
        super().__init__(token, weights, RequestReader(MAX_PUBLISH_BYTES))
        self._plane = plane
        self._numbers = count()
        self._streams = folder / "streams.json"
        self._created: dict[str, dict[str, Any]] = {}
        self._writing = asyncio.Lock()
        self._limits = {name: BodyLimit(plane.store.capacity_bytes) for name in WITH_TENSORS}
        for name in OPERATIONS:
            self.route("POST", f"/v1/{name}", self._operate)
        self.route("PUT", "/v1/weights", self._publish)
        self.route("PUT", FILE, self._receive)
        self.route("GET", "/openapi.json", self._describe)
        for name, kept in (json.loads(self._streams.read_text()) if self._streams.exists() else {}).items():
            plane.create(Create.model_validate(kept["request"]), kept["owner"])
            self._created[name] = kept

    async def _operate(self, request: Request) -> Response:
        """Run one operation."""
        name = request.url.path.rpartition("/")[2]
        if name not in WITH_TENSORS:
            body = await self._reader.body(request, MAX_JSON_BYTES)
            return await self._answer(request, name, await self._reader.parsed(json_object, body), {})
        most = min(MAX_BODY_BYTES, self._plane.store.capacity_bytes)
        async with self._limits[name].room(announced_bytes(request, most)):
            return await self._answer(request, name, *decoded(await body_of(request, most)))

    async def _answer(
        self, request: Request, name: str, says: dict[str, Any], arrays: dict[str, NDArray[Any]]
    ) -> Response:
        message = Message(kind=Kind[name.upper()], says=says, arrays=arrays)
        asked, client = parsed(message), client_of(request)
        self._check_version(asked)
        holder = f"{client}#{next(self._numbers)}" if name == "begin" else client
        answer = await Session(self._plane, holder).answer(message)
        self._remember(asked, client)
        if isinstance(asked, Take):
            return await self._granted(request, asked, client, answer)
        ids = {"ids": answer.arrays[IDS].tolist()} if isinstance(asked, Begin) else {}
        return JSONResponse(answer.says | ids)

    async def _granted(self, request: Request, asked: Take, client: str, answer: Message) -> Response:
        """Return the columns of a lease, which the plane's own store has."""
        lease = answer.says["lease"]
        if lease is not None and await request.is_disconnected():
            self._plane.give_back(Return(stream=asked.stream, lease=lease), client)
            lease = None
        if lease is None:
            return Response(status_code=204)
        found = {name: answer.arrays[name] for name in (IDS, ROWS, TOKENS)}
        for place, names in enumerate(answer.says["columns"]):
            cells = answer.arrays[f"{CELLS}{place}"]
            found |= self._plane.store.gathered(names, cells[:, 1], cells[:, 2])
        columns = self._plane.table(asked.stream).schema.columns
        halves = frozenset(name for name, column in columns.items() if column.dtype == "bfloat16")
        says = {"stream": asked.stream, "stage": asked.stage, "lease": lease}
        return Response(encoded(says, found, halves), media_type=TENSORS)

    def _check_version(self, asked: BaseModel) -> None:
        """Raise Declined unless the policy version of rows was published; version 0 is there before."""
        version = asked.version if isinstance(asked, Begin | Done) else None
        newest = max(self._weights.version, 0)
        if version is not None and not 0 <= version <= newest:
            why = f"versions 0 to {newest} were published"
            fix = "send the version of the weights that sampled the rows"
            raise Declined(422, f"rows of version {version}", why=why, fix=fix)

    def _remember(self, asked: BaseModel, client: str) -> None:
        """Keep the open streams in the folder, for a service that starts there again."""
        if isinstance(asked, Create) and asked.stream not in self._created:
            self._created[asked.stream] = {"request": asked.model_dump(mode="json"), "owner": client}
        elif isinstance(asked, Look) and asked.action == "close" and asked.stream in self._created:
            del self._created[asked.stream]
        else:
            return
        replace(self._streams, [json.dumps(self._created).encode()])

    async def _receive(self, request: Request) -> Response:
        """Store a file of the next version."""
        version, name = request.path_params["version"], request.path_params["file"]
        return JSONResponse({"bytes": await self._weights.receive(version, name, _steady(request.stream()))})

    async def _publish(self, request: Request) -> Response:
        """Publish the files of the next version, and wake the clients that wait for them."""
        version = whole(request, "version")
        body = await self._reader.body(request, MAX_PUBLISH_BYTES)
        asked = checked_request(Publish, await self._reader.parsed(json_object, body))
        async with self._writing:
            self._weights.require_next(version)
            await asyncio.to_thread(self._weights.publish, version, asked.files)
        self.ring()
        return JSONResponse({"version": version})

    async def _describe(self, request: Request) -> Response:
        """Return the OpenAPI document."""
        del request
        return JSONResponse(openapi())

    @asynccontextmanager
    async def _living(self, app: Starlette) -> AsyncIterator[None]:
        expiring = asyncio.ensure_future(self._plane.expire())
        async with super()._living(app):
            yield
        expiring.cancel()


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
            why = f"no byte came for {BODY_WITHIN_S:g} s, or the client left"
            raise Declined(408, what, why=why) from None
        if part is None:
            return
        yield part
