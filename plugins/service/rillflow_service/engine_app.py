"""EngineApp: the HTTP paths by which programs in any language sample the rows of a run.

    GET  /v1/model                             config.json, vocabulary, stop tokens, context
    GET  /v1/weights, /v1/weights/N/FILE       the newest version: see HttpApp
    POST /v1/rows/take      TakeRows -> rows   lease rows, or 204
    POST /v1/rows/put       PutRows            sampled rows: all of them are accepted, or none
    POST /v1/rows/renew     OfLease            move a lease's deadline
    POST /v1/rows/return    OfLease            end a lease
    GET  /v1/status                            counts of rows, refusals by rule, clients

Bodies are JSON. The status of an error is 409 for a lease that has ended, 410 for weights or a run that are
gone, 422 for a row or a request that breaks a rule.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rillflow.errors import RillflowError, StreamError
from rillflow.serving.http_body import checked_request, json_object
from rillflow.serving.request_reader import RequestReader
from rillflow.workers.wire import MAX_JSON_BYTES
from rillflow_service.http_app import HttpApp, client_of
from rillflow_service.requests import OfLease, PutRows, TakeRows
from rillflow_service.row_leases import RowLeases
from rillflow_service.weight_folder import WeightFolder

MAX_PUT_BYTES = 2**25
"""Largest body of a put; a client puts rows of a lease in several parts."""
MOST_PUT_BYTES = 2**28
"""Largest total size of the puts that arrive or wait to be checked."""
MAX_PUT_VALUES = 2**21
"""Most values of a put: a million tokens with their log probabilities."""
R = TypeVar("R", bound=BaseModel)
_log = logging.getLogger(__name__)


class EngineApp(HttpApp):
    """HTTP handlers of a sampler rank.

    Args:
        leases: rows of the run.
        weights: weights of the run.
        model: answer of ``/v1/model``.
        token: bearer token of every request.
    """

    paths = "the paths are /v1/model, /v1/weights, /v1/rows/take, put, renew, return, and /v1/status"
    page = "plugins/service/docs/engines.md"
    longest_wait_s = 60

    def __init__(
        self, leases: RowLeases, weights: WeightFolder, *, model: Mapping[str, Any], token: str
    ) -> None:
        super().__init__(token, weights, RequestReader(MAX_PUT_BYTES, MOST_PUT_BYTES))
        self._leases, self._model = leases, dict(model)
        self.route("GET", "/v1/model", self._describe)
        self.route("GET", "/v1/status", self._status)
        self.route("POST", "/v1/rows/take", self._take)
        self.route("POST", "/v1/rows/put", self._put)
        self.route("POST", "/v1/rows/renew", self._renew)
        self.route("POST", "/v1/rows/return", self._give_back)

    @property
    def is_over(self) -> bool:
        """See HttpApp."""
        return self._leases.is_over

    def refused(self, request: Request, error: RillflowError) -> None:
        """Count a refused put, and log the first by each rule."""
        if not request.url.path.endswith("/put") or not isinstance(error, StreamError):
            return
        client = client_of(request)
        if self._leases.count(error, client):
            _log.warning("rollout.engine service: refused rows of %s: %s (%s)", client, error.what, error.why)

    async def _describe(self, request: Request) -> Response:
        """Return the properties of the model that a sampler needs."""
        del request
        return JSONResponse(self._model)

    async def _status(self, request: Request) -> Response:
        """Return counts."""
        del request
        return JSONResponse({"version": self._weights.version, **self._leases.status()})

    async def _take(self, request: Request) -> Response:
        """Wait for rows and lease them to a client."""
        asked, client = await self._read(TakeRows, request), client_of(request)
        wait_s = min(asked.wait_s, self.longest_wait_s)
        granted = await self.found(lambda: self._leases.take(asked, client), wait_s, request)
        if granted is not None and await request.is_disconnected():
            self._leases.give_back(granted["lease"], client)
            granted = None
        if granted is None:
            return Response(status_code=204)
        return JSONResponse({**granted, "lease_s": asked.lease_s, "version": self._weights.version})

    async def _put(self, request: Request) -> Response:
        """Hand rows to the run; answer when it has checked them."""
        asked = await self._read(PutRows, request, MAX_PUT_BYTES)
        await asyncio.wrap_future(self._leases.propose(asked, client_of(request)))
        return JSONResponse({"accepted": len(asked.rows)})

    async def _renew(self, request: Request) -> Response:
        """Move the deadline of a lease."""
        asked = await self._read(OfLease, request)
        self._leases.renew(asked, client_of(request))
        return JSONResponse({"lease_s": asked.lease_s})

    async def _give_back(self, request: Request) -> Response:
        """End a lease."""
        asked = await self._read(OfLease, request)
        self._leases.give_back(asked.lease, client_of(request))
        return JSONResponse({})

    async def _read(self, kind: type[R], request: Request, most: int = MAX_JSON_BYTES) -> R:
        """Return a request of this kind."""
        return await self._reader.parsed(
            lambda body: checked_request(kind, json_object(body, max_values=MAX_PUT_VALUES)),
            await self._reader.body(request, most),
        )
