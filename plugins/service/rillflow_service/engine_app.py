"""Engine app: the HTTP paths by which programs in any language sample the rows of a run.

    GET  /v1/model                             config.json, vocabulary, stop tokens, context
    GET  /v1/weights?newer_than=N&wait_s=S     files of the newest version, or 204
    GET  /v1/weights/VERSION/FILE              a safetensors file
    POST /v1/rows/take      TakeRows -> rows   lease rows, or 204
    POST /v1/rows/put       PutRows            sampled rows: all of them are accepted, or none
    POST /v1/rows/renew     OfLease            move a lease's deadline
    POST /v1/rows/return    OfLease            end a lease
    GET  /v1/status                            counts of rows, refusals by rule, clients

Bodies are JSON. Every request carries the token, and should name its client; an error is JSON with its three
sentences. The status is 409 for a lease that has ended, 410 for weights or a run that are gone, 422 for a row
or a request that breaks a rule.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Send

from rillflow.errors import RillflowError, StreamError
from rillflow.formulas.counter import uniform
from rillflow.serving.http_body import Declined, body_of, checked_request, json_object
from rillflow.workers.wire import MAX_JSON_BYTES
from rillflow_service.access import announced_bytes, client_of, guarded
from rillflow_service.body_limit import BodyLimit
from rillflow_service.published_weights import PublishedWeights, WeightFile
from rillflow_service.requests import OfLease, PutRows, TakeRows
from rillflow_service.row_leases import Granted, Offered, RowLeases

MAX_PUT_BYTES = 2**25
"""Largest body of a put; a client puts rows of a lease in several parts."""
MOST_PUT_BYTES = 2**28
"""Largest total size of the puts that arrive or wait to be checked."""
LOOK_S = 0.5
"""Longest time between two looks of a waiting client; leases that end ring no bell."""
LONGEST_WAIT_S = 60.0
_log = logging.getLogger(__name__)


class EngineApp:
    """HTTP handlers of a sampler rank.

    Args:
        leases: rows of the run.
        weights: weights of the run.
        model: answer of ``/v1/model``.
        token: bearer token of every request.
        seed: the run's seed, from which every row's seed follows.
    """

    def __init__(
        self, leases: RowLeases, weights: PublishedWeights, *, model: Mapping[str, Any], token: str, seed: int
    ) -> None:
        self._leases, self._weights, self._model, self._token = leases, weights, model, token
        self._seed, self._limit = seed, BodyLimit(MOST_PUT_BYTES)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._bell: asyncio.Event | None = None

    def app(self) -> Starlette:
        """Return the ASGI application."""
        posts = {"take": self.take, "put": self.put, "renew": self.renew, "return": self.give_back}
        gets = {
            "/v1/model": self.describe,
            "/v1/weights": self.manifest,
            "/v1/weights/{version:int}/{file}": self.file,
            "/v1/status": self.status,
        }
        routes = [
            Route(f"/v1/rows/{name}", guarded(self._token, each, self._refused), methods=["POST"])
            for name, each in posts.items()
        ]
        routes += [Route(path, guarded(self._token, each), methods=["GET"]) for path, each in gets.items()]
        refuse = guarded(self._token, self.refuse)

        async def unknown(request: Request, error: Exception) -> Response:
            del error
            return cast(Response, await refuse(request))

        return Starlette(
            routes=routes, lifespan=self._living, exception_handlers={404: unknown, 405: unknown}
        )

    def ring(self) -> None:
        """Wake the waiting clients; from any thread."""
        if self._loop is not None and self._bell is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._bell.set)

    async def describe(self, request: Request) -> Response:
        """Return what a sampler must know of the model."""
        del request
        return JSONResponse(dict(self._model))

    async def manifest(self, request: Request) -> Response:
        """Return the files of a version newer than the given one; wait for it."""
        newer_than = _whole(request, "newer_than", -1)
        wait_s = min(_whole(request, "wait_s", 0), LONGEST_WAIT_S)
        found = await self._found(lambda: self._weights.manifest(newer_than), wait_s, request)
        return Response(status_code=204) if found is None else JSONResponse(found)

    async def file(self, request: Request) -> Response:
        """Return a file of the weights."""
        version = request.path_params["version"]
        file = self._weights.file(version, request.path_params["file"])
        headers = {"content-length": str(file.num_bytes), "x-rillflow-sha256": file.sha256}
        parts = self._read(version, file)
        return _CutOff(parts, media_type="application/octet-stream", headers=headers)

    async def _read(self, version: int, file: WeightFile) -> AsyncIterator[bytes]:
        parts = self._weights.read(version, file)
        while (part := await asyncio.to_thread(next, parts, None)) is not None:
            yield part

    async def take(self, request: Request) -> Response:
        """Lease rows; wait for them."""
        asked, client = checked_request(TakeRows, await _json(request)), client_of(request)
        granted = await self._found(
            lambda: self._leases.take(asked, client), min(asked.wait_s, LONGEST_WAIT_S), request
        )
        if granted is None:
            return Response(status_code=204)
        if await request.is_disconnected():
            self._leases.give_back(granted.lease, client)
            return Response(status_code=204)
        return JSONResponse(self._told(granted, asked.lease_s))

    async def put(self, request: Request) -> Response:
        """Hand rows to the run; answer when it has checked them."""
        async with self._limit.room(announced_bytes(request, MAX_PUT_BYTES)):
            asked = checked_request(PutRows, json_object(await body_of(request, MAX_PUT_BYTES)))
            await asyncio.wrap_future(self._leases.propose(asked, client_of(request)))
            return JSONResponse({"accepted": len(asked.rows)})

    async def renew(self, request: Request) -> Response:
        """Move the deadline of a lease."""
        asked = checked_request(OfLease, await _json(request))
        self._leases.renew(asked, client_of(request))
        return JSONResponse({"lease_s": asked.lease_s})

    async def give_back(self, request: Request) -> Response:
        """End a lease."""
        asked = checked_request(OfLease, await _json(request))
        self._leases.give_back(asked.lease, client_of(request))
        return JSONResponse({})

    async def status(self, request: Request) -> Response:
        """Return counts."""
        del request
        return JSONResponse({"version": self._weights.version, **self._leases.status()})

    async def refuse(self, request: Request) -> Response:
        """Refuse an unknown path or method."""
        raise Declined(
            404,
            f"there is no endpoint {request.method} {request.url.path[:80]}",
            why="the paths are /v1/model, /v1/weights, /v1/rows/take, put, renew, return, and /v1/status",
            fix="read plugins/service/docs/engines.md",
        )

    def _told(self, granted: Granted, lease_s: float) -> dict[str, Any]:
        rows = [self._row(each) for each in granted.rows]
        return {
            "lease": granted.lease,
            "lease_s": lease_s,
            "version": self._weights.version,
            "rows": rows,
        }

    def _row(self, offered: Offered) -> dict[str, Any]:
        """Return a row as clients see it; its seed depends only on the run's seed and the row."""
        rollout, sampling = offered.rollout, offered.sampling
        drawn = uniform(self._seed, torch.tensor(rollout.row), torch.tensor(len(rollout.tokens)))
        return {
            "row": offered.number,
            "id": list(rollout.row),
            "tokens": list(rollout.tokens),
            "max_tokens": offered.most,
            "temperature": sampling.temperature,
            "seed": int(float(drawn) * 2**53),
            "oldest_version": offered.oldest,
        }

    async def _found(self, look: Callable[[], Any], wait_s: float, request: Request) -> Any:
        """Return what ``look`` finds; look again at the bell, until the time is over or the client left."""
        assert self._bell is not None, "the application lives"
        loop = asyncio.get_running_loop()
        until = loop.time() + wait_s
        while True:
            self._bell.clear()
            left = min(LOOK_S, until - loop.time())
            if (found := look()) is not None or left <= 0:
                return found
            with suppress(TimeoutError):
                await asyncio.wait_for(self._bell.wait(), left)
            if await request.is_disconnected():
                return None

    def _refused(self, request: Request, error: RillflowError) -> None:
        """Count a refused put, and log the first by each rule."""
        if not request.url.path.endswith("/put") or not isinstance(error, StreamError):
            return
        client = client_of(request)
        if self._leases.count(error, client):
            _log.warning("rollout.engine service: refused rows of %s: %s (%s)", client, error.what, error.why)

    @asynccontextmanager
    async def _living(self, app: Starlette) -> AsyncIterator[None]:
        del app
        self._loop, self._bell = asyncio.get_running_loop(), asyncio.Event()
        yield


class _CutOff(StreamingResponse):  # type: ignore[misc]
    """A body that may end early: the connection is then closed, so the client sees that bytes are missing."""

    async def stream_response(self, send: Send) -> None:
        """Send the parts; return without an end if there are no more of them."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for part in self.body_iterator:
                await send({"type": "http.response.body", "body": part, "more_body": True})
        except Declined as error:
            _log.info("weights were cut off: %s", error.why)
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _json(request: Request) -> dict[str, Any]:
    return json_object(await body_of(request, MAX_JSON_BYTES))


def _whole(request: Request, name: str, default: int) -> int:
    said = request.query_params.get(name, str(default))
    if not said.removeprefix("-").isdecimal() or len(said) > 12:
        raise StreamError(f"{name} is {said[:80]!r}", why="it must be a whole number")
    return int(said)
