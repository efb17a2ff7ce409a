"""App: the HTTP application of the Tinker API.

    client ─ POST /api/v1/... ─> check, order ─> EngineThread ─ result ─> Future
                  <─ request_id ─┘
    client ─ POST /api/v1/retrieve_future ─ waits at most ``POLL_S`` ─> result, error, or 408: ask again

Errors of requests with a future are results of the future, so that the client raises RequestFailedError with
their sentences. The event loop only keeps books: it waits for no lock, and tensors are touched in the engine
thread alone.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from asyncio import to_thread
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

from rillflow.errors import DataError, RillflowError
from rillflow.serving.http_body import Declined, checked_request, json_object
from rillflow.serving.request_reader import HeldRoom, RequestReader
from rillflow_training_service import requests
from rillflow_training_service.checkpoints import About, CheckpointPath, Kind, expiry, now
from rillflow_training_service.datums import read_pass
from rillflow_training_service.engine_thread import ClientJob, EngineThread, ServerError
from rillflow_training_service.listing import Listing
from rillflow_training_service.sample_requests import Sampling
from rillflow_training_service.service import Service
from rillflow_training_service.sessions import (
    ClientSession,
    Future,
    Model,
    SamplingSession,
    Sessions,
    sentence,
)
from rillflow_training_service.shared_base import Shape
from rillflow_training_service.wire import CONTENT_TYPE

POLL_S = 25.0
"""Longest wait for a result in one request; clients allow 45 s."""
SWEEP_S = 5.0
"""Seconds between two looks for silent clients."""
PASS_BYTES = 2**25
"""Largest ``forward_backward``. Clients send at most 5 MB of a batch in one request."""
SAMPLE_BYTES = 2**24
"""Largest ``asample``: a prompt of a million tokens."""
TELEMETRY_BYTES = 2**20
"""Largest telemetry, which is not parsed."""
OTHER_BYTES = 2**16
"""Largest body of the other requests; it is parsed in the event loop, in a few milliseconds."""
logger = logging.getLogger(__name__)
_PREFIX = "tml-"
"""Prefix that the client demands of its API key."""


class App:
    """The application.

    Args:
        service: does the work, in the engine thread.
        thread: the engine thread.
        names: names by which clients may call the base model.
        source: path of the base model, from which clients on this machine load the tokeniser.
        token: token of every request.
        door: the application of OpenAI's paths.
    """

    def __init__(
        self,
        service: Service,
        thread: EngineThread,
        *,
        names: frozenset[str],
        source: str,
        token: str,
        door: Starlette,
    ) -> None:
        self._service, self._thread = service, thread
        self._names, self._source, self._token, self._door = names, source, token, door
        self.sessions, self._reader = Sessions(self._release), RequestReader(PASS_BYTES)
        self._listing = Listing(
            self.sessions, service.checkpoints, [*sorted(names)], service.base.model.context, self._reader
        )

    def app(self) -> Starlette:
        """Return the ASGI application."""
        sizes = {"forward_backward": PASS_BYTES, "asample": SAMPLE_BYTES, "telemetry": TELEMETRY_BYTES}
        futures: dict[str, Callable[[bytes], Awaitable[Future]]] = {
            "create_model": self._create_model,
            "unload_model": self._unload_model,
            "forward_backward": self._forward_backward,
            "optim_step": self._optim_step,
            "save_weights": partial(self._save, "weights"),
            "save_weights_for_sampler": partial(self._save, "sampler_weights"),
            "load_weights": self._load_weights,
            "asample": self._sample,
        }
        posts: dict[str, Callable[[bytes], Awaitable[Any]]] = {
            "client/config": self._config,
            "client/dynamic_config": self._dynamic_config,
            "telemetry": self._telemetry,
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "create_sampling_session": self._create_sampling_session,
            "join_sampling_session": self._join,
            "get_info": self._info,
            "cancel_future": self._cancel,
        }
        routes = [
            Route(f"/api/v1/{name}", answer(each, sizes.get(name, OTHER_BYTES)), methods=["POST"])
            for answer, every in ((self._future, futures), (self._plain, posts))
            for name, each in every.items()
        ]
        routes += [
            Route("/api/v1/healthz", self._healthz, methods=["GET"]),
            Route("/api/v1/retrieve_future", self._guarded(self._retrieve), methods=["POST"]),
            Route("/api/v1/sessions/{name}/finish", self._guarded(self._finish), methods=["POST"]),
            *self._listing.routes(self._guarded),
        ]
        unknown = self._guarded(self._unknown)
        routes += [Route("/api/v1/{rest:path}", unknown, methods=["GET", "POST", "PUT", "DELETE"])]
        routes.append(Mount("/", app=self._door))
        return Starlette(routes=routes, middleware=[Middleware(HeldRoom)], lifespan=self._sweeping)

    @asynccontextmanager
    async def _sweeping(self, app: Starlette) -> AsyncIterator[None]:
        del app

        async def sweep() -> None:
            while True:
                await asyncio.sleep(SWEEP_S)
                self.sessions.sweep()
                await to_thread(self._service.checkpoints.delete_expired)

        task = asyncio.create_task(sweep())
        try:
            yield
        finally:
            task.cancel()

    def _release(self, model: str) -> None:
        run = partial(self._service.release, model)
        self._thread.put(ClientJob(owner=model, run=run, tell=lambda _: None))

    def _work(self, owner: str, run: Callable[[], Any], future: Future) -> None:
        self._thread.put(ClientJob(owner=owner, run=run, tell=self._teller(future)))

    def _teller(self, future: Future) -> Callable[[Any], None]:
        loop = asyncio.get_running_loop()

        def tell(found: Any) -> None:
            with suppress(RuntimeError):  # the server and its event loop have ended
                loop.call_soon_threadsafe(future.finish, found)

        return tell

    def _guarded(self, operation: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Any]:
        async def guarded(request: Request) -> Response:
            try:
                self._require_key(request)
                return await operation(request)
            except RillflowError as error:
                status = error.status if isinstance(error, Declined) else 400
                return JSONResponse({"error": sentence(error), "category": "user"}, status_code=status)

        return guarded

    def _require_key(self, request: Request) -> None:
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        given = request.headers.get("x-api-key", bearer).encode()
        known = (self._token.encode(), f"{_PREFIX}{self._token}".encode())
        if not any(secrets.compare_digest(given, each) for each in known):
            raise Declined(
                401, "the API key is wrong", fix=f"set TINKER_API_KEY to {_PREFIX} and the server's token"
            )

    def _plain(self, operation: Callable[[bytes], Awaitable[Any]], most: int) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            return JSONResponse(await operation(await self._reader.body(request, most)))

        return self._guarded(answer)

    def _future(self, operation: Callable[[bytes], Awaitable[Future]], most: int) -> Callable[[Request], Any]:
        """Return the endpoint of an operation with a future; its error is the future's result."""

        async def answer(request: Request) -> Response:
            body = await self._reader.body(request, most)
            try:
                future = await operation(body)
            except Declined:
                raise
            except RillflowError as error:
                future = self.sessions.failed(None, error)
            except Exception as error:  # a client would repeat a request with status 500 for minutes
                logger.exception("a request failed")
                why = f"{type(error).__name__}: {error}"
                future = self.sessions.failed(
                    None, ServerError("the server failed on this request", why, "read the server's log")
                )
            ids = [f"{future.name}:{index}" for index in range(future.num_samples)]
            told: dict[str, Any] = {"request_id": future.name, "sample_sequence_ids": ids}
            return JSONResponse(told)

        return self._guarded(answer)

    async def _retrieve(self, request: Request) -> Response:
        body = await self._reader.body(request, OTHER_BYTES)
        future = self.sessions.future(checked(requests.OfFuture, body).request_id)
        with suppress(TimeoutError):
            await asyncio.wait_for(future.done.wait(), POLL_S)
        if not future.done.is_set():
            told = {"type": "try_again", "request_id": future.name, "queue_state": "active"}
            return JSONResponse(told, status_code=408)
        self.sessions.delivered(future)
        return Response(future.body, media_type=CONTENT_TYPE if future.is_binary else "application/json")

    async def _healthz(self, request: Request) -> Response:
        del request
        return JSONResponse({"status": "ok"})

    async def _unknown(self, request: Request) -> Response:
        what = f"there is no endpoint {request.method} {request.url.path[:80]}"
        raise Declined(404, what, why="plugins/training_service/docs/training_service.md says what is served")

    async def _config(self, body: bytes) -> dict[str, Any]:
        del body
        return {
            "pjwt_auth_enabled": False,
            "parallel_fwdbwd_chunks": True,
            "proto_compress_fwdbwd": False,
            "custom_loss_server_side": False,
            "sample_use_retrieve_futures": False,
            "sample_join_sampling_session": True,
        }

    async def _dynamic_config(self, body: bytes) -> dict[str, Any]:
        del body
        return {"sample_cancel_enabled": True}

    async def _telemetry(self, body: bytes) -> dict[str, Any]:
        del body  # nothing is kept
        return {"status": "accepted"}

    async def _create_session(self, body: bytes) -> dict[str, Any]:
        asked = checked(requests.CreateSession, body)
        made = self.sessions.open(secrets.token_hex(12), asked.user_metadata or {})
        return {"type": "create_session", "session_id": made.name}

    async def _heartbeat(self, body: bytes) -> dict[str, Any]:
        self.sessions.hear(checked(requests.OfSession, body).session_id)
        return {"type": "session_heartbeat"}

    async def _finish(self, request: Request) -> Response:
        session = self.sessions.hear(request.path_params["name"])
        asked = checked(requests.FinishSession, await self._reader.body(request, OTHER_BYTES))
        self.sessions.end(
            session, f"its client finished it{': ' if asked.detail else ''}{asked.detail or ''}"
        )
        return JSONResponse({})

    async def _create_model(self, body: bytes) -> Future:
        asked = checked(requests.CreateModel, body)
        session, lora = self.sessions.hear(asked.session_id), asked.lora_config
        self._require_base(asked.base_model)
        if lora is None:
            raise DataError(
                "create_model has no lora_config",
                why="clients share one frozen base, so each trains an adapter",
                fix="create_lora_training_client",
            )
        if asked.optimizer_config.type != "adamw":
            raise DataError(f"there is no optimizer {asked.optimizer_config.type!r}", why="there is adamw")
        shape = Shape(
            rank=lora.rank, attention=lora.train_attn, mlp=lora.train_mlp, unembed=lora.train_unembed
        )
        self._service.base.config(shape)
        seed = secrets.randbelow(2**62) if lora.seed is None else lora.seed
        name = f"{session.name}:train:{asked.model_seq_id}"
        metadata = asked.user_metadata or {}

        def begin(future: Future) -> None:
            self._add(name, session, asked.base_model, shape, seed, metadata)
            self._work(name, partial(self._service.create, name, shape, seed), future)

        return self.sessions.admit(session, f"{name}:0", body, begin)

    def _add(
        self, name: str, session: ClientSession, base: str, shape: Shape, seed: int, metadata: dict[str, Any]
    ) -> None:
        made = Model(name=name, session=session, base_model=base, shape=shape, seed=seed, metadata=metadata)
        self.sessions.add_model(made)

    async def _load_weights(self, body: bytes) -> Future:
        asked = checked(requests.LoadWeights, body)
        if asked.session_id is None:
            model = self.sessions.model(asked.model_id or "")

            def load() -> dict[str, Any]:
                path = CheckpointPath.parsed(asked.path)
                return self._service.load(model.name, path, optimizer=asked.optimizer)

            return self._in_order(model, asked.seq_id or 0, body, load)
        session, path = self.sessions.hear(asked.session_id), CheckpointPath.parsed(asked.path)
        about = await to_thread(self._service.checkpoints.about, path)
        base = asked.base_model or about.base_model
        self._require_base(base)
        name = f"{session.name}:train:{asked.model_seq_id}"

        def begin(future: Future) -> None:
            self._add(name, session, base, about.shape, about.seed, asked.user_metadata or {})
            run = partial(self._service.create_from, name, path, optimizer=asked.optimizer)
            self._work(name, run, future)

        return self.sessions.admit(session, f"{name}:0", body, begin)

    def _in_order(self, model: Model, seq: int, body: bytes, run: Callable[[], Any]) -> Future:
        return self.sessions.admit_in_order(model, seq, body, partial(self._work, model.name, run))

    async def _unload_model(self, body: bytes) -> Future:
        asked = checked(requests.OfModel, body)
        session = self.sessions.model(asked.model_id).session
        self.sessions.unload(asked.model_id)
        told = {"model_id": asked.model_id, "type": "unload_model"}
        return self.sessions.admit(session, f"{asked.model_id}:unload", body, lambda each: each.finish(told))

    async def _forward_backward(self, body: bytes) -> Future:
        asked = await self._reader.parsed(read_pass, body)
        model = self.sessions.model(asked.model_id)
        return self._in_order(model, asked.seq_id, body, partial(self._service.forward_backward, asked))

    async def _optim_step(self, body: bytes) -> Future:
        placed = checked(requests.Sequenced, body)

        def step() -> dict[str, Any]:
            adam = checked(requests.OptimStep, body).adam_params
            if adam is None:
                raise DataError(
                    "optim_step has no adam_params", why="the served models are trained with adamw"
                )
            return self._service.optim_step(placed.model_id, adam.params)

        return self._in_order(self.sessions.model(placed.model_id), placed.seq_id, body, step)

    async def _save(self, kind: Kind, body: bytes) -> Future:
        placed = checked(requests.Sequenced, body)
        model = self.sessions.model(placed.model_id)
        asked = checked(requests.SaveWeights, body)
        run: Callable[[], Any] = partial(self._checkpoint, model, kind, asked)
        if kind == "sampler_weights" and asked.path is None:
            run = self._keep(model, asked)
        return self._in_order(model, placed.seq_id, body, run)

    def _checkpoint(self, model: Model, kind: Kind, asked: requests.SaveWeights) -> dict[str, Any]:
        path = CheckpointPath(model=model.name, kind=kind, name=asked.path or f"step-{asked.seq_id:06d}")
        about = About(
            path=str(path),
            base_model=model.base_model,
            shape=model.shape,
            seed=model.seed,
            time=now(),
            expires_at=expiry(asked.ttl_seconds),
            user_metadata=asked.user_metadata or {},
        )
        is_state = kind == "weights"
        return self._service.save(
            model.name, path, about, optimizer=is_state, overwrite=asked.overwrite or not is_state
        )

    def _keep(self, model: Model, asked: requests.SaveWeights) -> Callable[[], dict[str, Any]]:
        """Return the work that keeps weights for a new sampling session."""
        number = asked.sampling_session_seq_id or 0
        key = "inflight" if asked.kind == "inflight" else f"sample:{number}"
        made = SamplingSession(
            name=f"{model.session.name}:sample:{number}",
            session=model.session,
            base_model=model.base_model,
            model=model.name,
            key=key,
            path=None,
            random_key=f"model {model.seed} {number}",
        )
        self.sessions.add_sampler(made)

        def keep() -> dict[str, Any]:
            self._service.snapshot(model.name, key)
            return {"sampling_session_id": made.name, "type": "save_weights_for_sampler"}

        return keep

    async def _create_sampling_session(self, body: bytes) -> dict[str, Any]:
        asked = checked(requests.CreateSamplingSession, body)
        session, base, seed = self.sessions.hear(asked.session_id), asked.base_model, secrets.token_hex(8)
        number = asked.sampling_session_seq_id
        if asked.model_path is not None:
            path = CheckpointPath.parsed(asked.model_path)
            about = await to_thread(self._service.checkpoints.about, path)
            base = base or about.base_model
            if path.model in session.models:
                seed = f"model {about.seed} {number}"
        self._require_base(base or "")
        made = SamplingSession(
            name=f"{session.name}:sample:{number}",
            session=session,
            base_model=base or "",
            model=None,
            key="",
            path=asked.model_path,
            random_key=seed,
        )
        self.sessions.add_sampler(made)
        return {"type": "create_sampling_session", "sampling_session_id": made.name}

    async def _join(self, body: bytes) -> dict[str, Any]:
        session = self.sessions.sampler(checked(requests.OfSampler, body).sampling_session_id).session
        session.clones += 1
        return {"type": "join_sampling_session", "client_counter": session.clones}

    async def _sample(self, body: bytes) -> Future:
        asked = await self._reader.parsed(partial(checked, requests.SampleBody), body)
        sampler = self.sessions.sampler(asked.sampling_session_id or "")
        name = f"{sampler.name}:{asked.seq_id}"

        def begin(future: Future) -> None:
            made = Sampling(
                service=self._service,
                sampler=sampler,
                asked=asked,
                name=name,
                tell=self._teller(future),
                wake=self._thread.wake,
            )
            future.cancel, future.num_samples = made.cancel, asked.num_samples
            tell = made.tell

            def failed(found: Any) -> None:
                if found is not None:
                    tell(found)

            kind = {"is_sampling": True, "is_quick": not asked.prompt_logprobs}
            self._thread.put(ClientJob(owner=sampler.name, run=made.begin, tell=failed, **kind))

        return self.sessions.admit(sampler.session, name, body, begin)

    async def _cancel(self, body: bytes) -> dict[str, Any]:
        future = self.sessions.future(checked(requests.OfFuture, body).request_id)
        future.cancel()
        future.finish(DataError("the request was cancelled", why="its client asked for that"))
        return {}

    async def _info(self, body: bytes) -> dict[str, Any]:
        model = self.sessions.model(checked(requests.OfModel, body).model_id)
        arch = type(self._service.base.module).__name__
        return {
            "type": "get_info",
            "model_data": {"arch": arch, "model_name": model.base_model, "tokenizer_id": self._source},
            "model_id": model.name,
            "is_lora": True,
            "lora_rank": model.shape.rank,
            "model_name": model.base_model,
        }

    def _require_base(self, name: str) -> None:
        if name.partition(":")[0] not in self._names:
            raise DataError(
                f"there is no base model {name[:120]!r}",
                why="one model is served",
                fix=f"use {' or '.join(sorted(self._names, key=len)[:3])}",
            )


def checked(kind: type[requests.R], body: bytes) -> requests.R:
    """Return a request.

    Raises:
        StreamError: the body is not JSON, or a value is invalid.
    """
    return checked_request(kind, json_object(body))
