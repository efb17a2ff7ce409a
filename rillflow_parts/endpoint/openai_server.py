"""Door: serve the current policy with OpenAI's protocol.

    POST /v1/chat/completions    POST /v1/completions    POST /v1/responses        every request needs a key
    GET /v1/models    GET /v1/models/NAME                GET /health                without one

    key ─> Visitor ─ begin ─> rows ─> EngineQueue ─ answers ─> JSON, or events if streamed

A visitor determines the rows of a request: new ones (``NewRows``), or the continuation of an agent's own row.
When a client disconnects, its rows are dropped. An error is OpenAI's error object, with our three sentences
as message. Encoding runs in a separate thread, so a long prompt delays no other client.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from asyncio import to_thread, wrap_future
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from itertools import count
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from rillflow.errors import DataError, RillflowError, StreamError
from rillflow.records.rollout import Finish, Rollout
from rillflow.records.row import RowId
from rillflow.rollout.config import SamplingConfig
from rillflow.serving.http_body import SMALL_BYTES, Declined, json_object
from rillflow.serving.request_reader import HeldRoom, RequestReader
from rillflow.tasks.encoded import Encoder
from rillflow.tasks.example import Example
from rillflow_parts.endpoint.engine_queue import EngineQueue, Told, Wanted
from rillflow_parts.endpoint.messages import chat_of, require_ordinary
from rillflow_parts.endpoint.openai_answers import Choice, envelope
from rillflow_parts.endpoint.openai_protocol import ChatRequest, CompletionRequest, SamplingRequest, checked
from rillflow_parts.endpoint.responses import Output, ResponsesRequest
from rillflow_parts.endpoint.text_scores import TextScores
from rillflow_parts.endpoint.tool_calls import ToolFormat

MAX_REQUEST_BYTES = 2**24
ASKED_EPOCH, SEEDED_EPOCH = -3, -4
"""Epochs in the row ids of client requests, so that no other row shares their random numbers; requests with a
seed have their own."""
MAX_REQUEST_ROWS = 1024
"""Largest number of rows of a request: prompts times answers to each."""
MAX_REQUEST_TOKENS = 2**22
"""Largest number of prompt tokens in the rows of a request: each row of an answer repeats its prompt's."""
_GONE_S = 0.5
_KINDS = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}
"""OpenAI's error type by status, for errors that the request did not cause."""


class Visitor(Protocol):
    """The owner of a key."""

    is_left: bool
    """Whether the owner's rows were given up."""

    def begin(self, asked: SamplingRequest) -> list[Rollout]:
        """Return the rows that a request continues."""

    def sampling(self, asked: SamplingRequest) -> SamplingConfig:
        """Return the sampling settings of the rows; called after ``begin``."""

    def over(self, asked: SamplingRequest, rollouts: list[Rollout]) -> None:
        """Finish a request whose rows have all ended; without rows, the request was given up."""


class NewRows:
    """A visitor whose every request begins new rows.

    Args:
        encoder: encodes prompts.
        usual: sampling settings, unless a request overrides them.
        first: number of the first request's row, which chooses its random numbers.
    """

    is_left = False

    def __init__(self, encoder: Encoder, usual: SamplingConfig, *, first: int = 0) -> None:
        self._encoder, self._usual, self._numbers = encoder, usual, count(first)

    def begin(self, asked: SamplingRequest) -> list[Rollout]:
        """See Visitor."""
        if isinstance(asked, CompletionRequest):
            self._require_few(len(asked.prompts), asked.n)
        encoder = encoder_for(asked, self._encoder)
        prompts = [chat_of(asked)] if isinstance(asked, ChatRequest) else prompts_of(asked)
        tokens = [
            encoder.rows([each])[0].prompt.tolist() if isinstance(each, Example) else each for each in prompts
        ]
        if (total := asked.n * sum(map(len, tokens))) > MAX_REQUEST_TOKENS:
            what = f"the rows of the request have {total:,} prompt tokens"
            why = f"the limit is {MAX_REQUEST_TOKENS:,}"
            raise DataError(what, why=why, fix="send fewer prompts, or a smaller n")
        first = [Rollout.start(self._row(asked, each), each) for each in tokens]
        return [
            replace(each, row=each.row._replace(sample=sample)) for each in first for sample in range(asked.n)
        ]

    def _row(self, asked: SamplingRequest, prompt: Sequence[int]) -> RowId:
        """Return the id of a prompt's rows: with a seed that is used, the same for the same prompt."""
        if asked.seed is None or self.sampling(asked).temperature == 0:
            return RowId(ASKED_EPOCH, next(self._numbers), 0)
        told = json.dumps([asked.seed, [*prompt]]).encode()
        number = int.from_bytes(blake2b(told, digest_size=7).digest())
        return RowId(SEEDED_EPOCH, number, 0)

    def sampling(self, asked: SamplingRequest) -> SamplingConfig:
        """See Visitor."""
        return asked.sampling(self._usual)

    def over(self, asked: SamplingRequest, rollouts: list[Rollout]) -> None:
        """See Visitor; keeps nothing."""

    def _require_few(self, prompts: int, samples: int) -> None:
        """Raise DataError for too many rows before their prompts cost time and memory."""
        if prompts * samples > MAX_REQUEST_ROWS:
            raise DataError(
                f"{prompts} prompts with n = {samples} are {prompts * samples:,} rows",
                why=f"the limit is {MAX_REQUEST_ROWS:,} rows per request",
                fix="send several requests",
            )


def encoder_for(asked: SamplingRequest, encoder: Encoder) -> Encoder:
    """Return the encoder with a request's variables of the chat template.

    Raises:
        DataError: a variable has the text of a special token.
    """
    if not isinstance(asked, ChatRequest) or not asked.variables:
        return encoder
    require_ordinary(asked, encoder.tokenizer.special_in)
    return replace(encoder, template_arguments={**encoder.template_arguments, **asked.variables})


def prompts_of(asked: SamplingRequest) -> list[Example | list[int]]:
    """Return a request's prompts, as texts or tokens.

    Raises:
        DataError: there is no prompt.
    """
    assert isinstance(asked, CompletionRequest)
    if not asked.prompts:
        raise DataError("prompt is []", why="there is nothing to continue")
    return [
        each if isinstance(each, list) else Example(index=0, prompt=each, place="the request")
        for each in asked.prompts
    ]


class Door:
    """The HTTP application for OpenAI's protocol.

    Args:
        queue: queue of the engine that samples.
        model: model name that requests may give.
        visitor: returns the owner of a key; None for an unknown key.
        tools: format in which the model writes tool calls.
        scores: returns the log probabilities of a text's tokens, called in the engine's thread; None if the
            prompt's log probabilities are not offered.
    """

    def __init__(
        self,
        queue: EngineQueue,
        *,
        model: str,
        visitor: Callable[[str], Visitor | None],
        tools: ToolFormat,
        scores: Callable[[Sequence[int]], TextScores] | None = None,
    ) -> None:
        self._queue, self._model, self._tools, self._scores = queue, model, tools, scores
        self._visitor = visitor

    def app(self) -> Starlette:
        """Return the ASGI application."""
        make, reader = self._guarded, RequestReader(MAX_REQUEST_BYTES)
        chat, text = (partial(self._complete, reader, kind) for kind in (ChatRequest, CompletionRequest))
        routes = [
            Route("/v1/chat/completions", make(chat), methods=["POST"]),
            Route("/v1/completions", make(text), methods=["POST"]),
            Route("/v1/responses", make(partial(self._respond, reader)), methods=["POST"]),
            Route("/v1/models", make(self._models), methods=["GET"]),
            Route("/v1/models/{name:path}", make(self._one_model), methods=["GET"]),
            Route("/health", _healthy, methods=["GET"]),
        ]
        refuse = make(self._refuse)

        async def unknown(request: Request, error: Exception) -> Response:
            del error
            return await refuse(request)

        async def failed(request: Request, error: Exception) -> Response:
            del request
            what = "the server failed on this request"
            told = StreamError(what, why=type(error).__name__, fix="read the server's log")
            return JSONResponse(_told(told, "server_error"), status_code=500)

        # The server logs unexpected errors, after ``failed`` has answered.
        handlers: dict[Any, Any] = {404: unknown, 405: unknown, Exception: failed}
        return Starlette(routes=routes, middleware=[Middleware(HeldRoom)], exception_handlers=handlers)

    async def _complete(
        self, reader: RequestReader, kind: type[SamplingRequest], request: Request, visitor: Visitor
    ) -> Response:
        body = await reader.body(request)
        asked = await reader.parsed(lambda body: checked(kind, json_object(body)), body)
        answer = await self._begun(reader, len(body), asked, visitor)
        around = partial(envelope, asked, f"{kind.kind}-{secrets.token_hex(8)}", self._model)
        if asked.stream:
            return StreamingResponse(self._events(answer, around), media_type="text/event-stream")
        if not await answer.run(request):
            return Response(status_code=499)
        scores: list[TextScores | None] = [None] * len(answer.choices)
        if isinstance(asked, CompletionRequest) and asked.reads_prompt:
            scores = [await self._scored(answer.rows[index]) for index in range(len(scores))]

        def told() -> Response:
            choices = [
                each.next(answer.rows[index], is_over=True, scores=scores[index])
                for index, each in enumerate(answer.choices)
            ]
            return JSONResponse(around(self._queue.version, choices=choices, usage=answer.usage))

        return await to_thread(told)

    async def _begun(
        self, reader: RequestReader, num_bytes: int, asked: SamplingRequest, visitor: Visitor
    ) -> _Answer:
        """Return a request's answer, whose rows have not begun to run."""
        if asked.model not in ("", self._model):
            what = f"there is no model {asked.model[:80]!r}"
            raise Declined(404, what, why="only one model is served", fix=f"use {self._model!r}, or omit it")
        if isinstance(asked, CompletionRequest) and asked.reads_prompt and self._scores is None:
            why = "this door returns log probabilities of sampled tokens only"
            raise StreamError("echo with logprobs is not supported", why=why, fix="omit echo or logprobs")
        begin = partial(visitor.begin, asked)
        begun = await (to_thread(begin) if num_bytes <= SMALL_BYTES else reader.alone(begin, rests=0))
        return _Answer(self._queue, asked, begun, visitor, self._tools)

    async def _scored(self, rollout: Rollout) -> TextScores:
        assert self._scores is not None, "a request for scores was accepted"
        return await wrap_future(self._queue.call(partial(self._scores, rollout.tokens)))

    async def _events(self, answer: _Answer, around: Callable[..., Any]) -> AsyncIterator[str]:
        try:
            async for choice in answer.parts():
                yield _event(around(self._queue.version, choices=[choice]))
            if answer.asked.stream_options.get("include_usage"):
                yield _event(around(self._queue.version, choices=[], usage=answer.usage))
        except RillflowError as error:
            yield _event(_told(error, "server_error"))
        yield "data: [DONE]\n\n"

    async def _respond(self, reader: RequestReader, request: Request, visitor: Visitor) -> Response:
        body = await reader.body(request)
        asked = await reader.parsed(lambda body: checked(ResponsesRequest, json_object(body)), body)
        chat = await reader.parsed(lambda _: asked.chat(), body)
        answer = await self._begun(reader, len(body), chat, visitor)
        output = Output(asked, f"resp_{secrets.token_hex(8)}", self._model)
        if asked.stream:
            return StreamingResponse(self._response_events(answer, output), media_type="text/event-stream")
        if not await answer.run(request):
            return Response(status_code=499)
        output.read(answer.choices[0].next(answer.rows[0], is_over=True))
        return JSONResponse(output.response(answer.usage))

    async def _response_events(self, answer: _Answer, output: Output) -> AsyncIterator[str]:
        try:
            async for choice in answer.parts():
                for event in output.events(choice):
                    yield event
            for event in output.end(answer.usage):
                yield event
        except RillflowError as error:
            yield output.failed(_told(error, "server_error"))

    @property
    def _about(self) -> dict[str, Any]:
        """The model, as a list of models describes it."""
        about = {"object": "model", "owned_by": "rillflow", "created": 0, "version": self._queue.version}
        return {"id": self._model, **about}

    async def _models(self, request: Request, visitor: Visitor) -> Response:
        del request, visitor
        return JSONResponse({"object": "list", "data": [self._about]})

    async def _one_model(self, request: Request, visitor: Visitor) -> Response:
        del visitor
        name = request.path_params["name"]
        if name != self._model:
            what = f"there is no model {name[:80]!r}"
            raise Declined(404, what, why="only one model is served", fix=f"use {self._model!r}")
        return JSONResponse(self._about)

    async def _refuse(self, request: Request, visitor: Visitor) -> Response:
        del visitor
        what = f"there is no endpoint {request.method} {request.url.path[:80]}"
        paths = ("chat/completions", "completions", "responses", "models")
        raise Declined(404, what, why=f"there are {', '.join(f'/v1/{path}' for path in paths)} and /health")

    def _guarded(self, operation: Callable[[Request, Visitor], Any]) -> Callable[[Request], Any]:
        async def guarded(request: Request) -> Response:
            key = request.headers.get("authorization", "").removeprefix("Bearer ")
            try:
                visitor = self._visitor(key)
                if visitor is None:
                    raise Declined(401, "the API key is wrong", fix="send the right key as a bearer token")
                answer: Response = await operation(request, visitor)
                return answer
            except RillflowError as error:
                status = error.status if isinstance(error, Declined) else 400
                return JSONResponse(
                    _told(error, _KINDS.get(status, "invalid_request_error")), status_code=status
                )

        return guarded


class _Answer:
    """The rows of one request, which run while the context is entered."""

    def __init__(
        self,
        queue: EngineQueue,
        asked: SamplingRequest,
        begun: list[Rollout],
        visitor: Visitor,
        tools: ToolFormat,
    ) -> None:
        self.asked, self.begun, self._stops = asked, begun, asked.ends(tools)
        self.choices = [Choice(asked, at, begin, queue.tokenizer, tools) for at, begin in enumerate(begun)]
        self.rows: dict[int, Rollout] = {}
        """Ended rows, by number."""
        self._queue, self._visitor, self._is_left = queue, visitor, False
        self._news: dict[
            int, tuple[Told, bool]
        ] = {}  # the newest of each row, for a client that reads slowly
        self._has_news = asyncio.Event()
        self._wanted = list[Wanted]()

    @property
    def is_over(self) -> bool:
        """Whether all rows have ended."""
        return len(self.rows) == len(self.begun)

    @property
    def usage(self) -> dict[str, int]:
        """Token counts of distinct prompts, and of all answers."""
        read = sum(len(each.tokens) for each in self.begun[:: self.asked.n])
        made = sum(choice.count for choice in self.choices)
        return {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}

    async def __aenter__(self) -> None:
        loop, asked, sampling = asyncio.get_running_loop(), self.asked, self._visitor.sampling(self.asked)

        def note(index: int, what: Told, is_over: bool) -> None:
            self._news[index] = what, is_over
            self._has_news.set()

        def tell(index: int, what: Told, is_over: bool) -> None:
            with suppress(RuntimeError):  # the server and its event loop have ended
                loop.call_soon_threadsafe(note, index, what, is_over)

        how: dict[str, Any] = {"sampling": sampling, "stops": self._stops, "is_streamed": asked.stream}
        how["is_left"] = lambda: self._is_left or self._visitor.is_left
        self._queue.put(
            *(
                Wanted(begin=each, tell=partial(tell, index), name=self._name(index), **how)
                for index, each in enumerate(self.begun)
            )
        )

    async def __aexit__(self, *_: object) -> None:
        self._is_left = True
        self._queue.wake()
        self._visitor.over(self.asked, [self.rows[index] for index in sorted(self.rows)] * self.is_over)

    def _name(self, index: int) -> str:
        """Return the name of a row in errors."""
        if len(self.begun) == self.asked.n:
            return "the request"
        return f"prompt {index // self.asked.n + 1} of the request"

    async def run(self, request: Request) -> bool:
        """Wait until all rows have ended; return whether the client is still there."""
        async with self:
            while not self.is_over:
                if await self.wait(_GONE_S) is None and await request.is_disconnected():
                    return False
        return True

    async def parts(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the new parts of the answers as they are sampled."""
        async with self:
            while not self.is_over:
                index, rollout = await self.wait() or (0, None)
                assert rollout is not None, "without a time limit there is always a rollout"
                yield self.choices[index].next(rollout, is_over=index in self.rows)

    async def wait(self, within_s: float | None = None) -> tuple[int, Rollout] | None:
        """Return the number and the state of the next row with news; None if there is none in time.

        Raises:
            RillflowError: a row could not continue.
        """
        try:
            await asyncio.wait_for(self._has_news.wait(), within_s)
        except TimeoutError:
            return None
        index = next(iter(self._news))
        what, is_over = self._news.pop(index)
        if not self._news:
            self._has_news.clear()
        if isinstance(what, RillflowError):
            raise what
        if is_over:
            if isinstance(self.asked, CompletionRequest) and self.asked.max_tokens == 0:
                what = what.first(len(self.begun[index].tokens), Finish.LENGTH)
            self.rows[index] = what
        return index, what


async def _healthy(request: Request) -> Response:
    """Answer anyone, without a key: the process serves."""
    del request
    return JSONResponse({"status": "ok"})


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


def _told(error: RillflowError, kind: str) -> dict[str, Any]:
    parts = [f"{name}: {text}" for name, text in (("why", error.why), ("fix", error.fix)) if text]
    message = "; ".join([error.what, *parts])
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}
