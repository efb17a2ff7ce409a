"""Sampling: rows of many requests in one pass, with the weights of one snapshot at a time.

    requests of a snapshot ─ rows ─> Batcher ─ EngineQueue ─ NativeEngine: all of them in each pass
    another snapshot ──────────────> Batcher of its own; all take turns, together ``SLICE_S``

consumes      sampling requests, until their rows have ended or their clients have left
waits for     nothing: ``turn`` runs passes for a part of ``SLICE_S``; beyond ``MOST_BATCHERS`` requests wait
produces      the answer of each request, or its error
shuts down    with its last row the engine goes back to the pool, and its KV cache is freed

Engines run in deterministic mode: a row has the same bits in any batch, so neither other clients nor the time
of a request's arrival change it. Random numbers depend on the request alone: on its seed and prompt, or on
the model's seed and the request's number.

A paused engine keeps its KV cache. Its weights are copied back into the base before it goes on.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from rillflow.config.load import validate
from rillflow.errors import RillflowError, StreamError
from rillflow.models.language_model import LanguageModel
from rillflow.records.rollout import Finish, Rollout
from rillflow.records.row import RowId
from rillflow.rollout.config import RolloutConfig, SamplingConfig
from rillflow.rollout.engine import Stops
from rillflow.rollout.native.engine import NativeEngine
from rillflow_parts.endpoint.engine_queue import EngineQueue, Told, Wanted
from rillflow_training_service.requests import SamplingParams
from rillflow_training_service.shared_base import Shape, SharedBase

logger = logging.getLogger(__name__)
SLICE_S = 0.5
"""Longest time of one turn of all batches, after which other work runs."""
MOST_BATCHERS = 8
"""Snapshots and stops that are sampled in turns; more wait until one has no rows left."""
_IDLE_ENGINES = 4
"""Engines without rows that are kept for the next requests."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Snapshot:
    """Weights that requests sample from."""

    key: str
    """Name; equal keys stand for equal weights."""
    shape: Shape | None
    """Shape of the adapter; None for the base model."""
    weights: Mapping[str, Tensor]
    """The adapter's weights, which nobody changes."""


@dataclass(frozen=True, kw_only=True)
class Stop:
    """The texts and tokens at which a row ends."""

    texts: tuple[str, ...] = ()
    """Texts that end a row."""
    tokens: tuple[int, ...] = ()
    """Tokens that end a row."""
    is_default: bool = True
    """Whether the model's own end tokens end a row too."""


@dataclass(kw_only=True, eq=False)
class SampleRequest:
    """A sampling request."""

    name: str
    """Name in errors."""
    prompt: Sequence[int]
    """Tokens of the prompt."""
    count: int
    """Number of samples."""
    sampling: SamplingConfig
    """Settings of sampling."""
    stop: Stop
    """Stop texts and stop tokens of the rows."""
    wants_prompt: int | None
    """Number of last prompt tokens whose log probabilities are wanted; None for no log probabilities."""
    random_key: str
    """Determines the random numbers."""
    tell: Callable[[list[Rollout] | RillflowError], None]
    """Receives the samples, or the error."""
    is_left: bool = False
    """Whether the client has left."""
    ended: dict[int, Rollout] = field(default_factory=dict)
    """Samples that have ended."""
    is_over: bool = False
    """Whether the client has received a result."""

    @property
    def group(self) -> tuple[int, int]:
        """Row ids' epoch and prompt, of 31 bits each."""
        digest = sha256(self.random_key.encode()).digest()
        return int.from_bytes(digest[:4]) >> 1, int.from_bytes(digest[4:8]) >> 1

    def finish(self, told: list[Rollout] | RillflowError) -> None:
        """Tell the result once."""
        if not self.is_over:
            self.is_over = True
            self.tell(told)


def sampling_of(given: SamplingParams, room: int) -> SamplingConfig:
    """Return the settings of a request.

    Args:
        given: the client's SamplingParams.
        room: tokens that fit after the prompt, the default of ``max_tokens``.

    Raises:
        ConfigError: a value is out of range.
    """
    asked = given.model_dump(include={"temperature", "top_p", "top_k", "max_tokens"}, exclude_none=True)
    if asked.get("top_k") == -1:
        del asked["top_k"]
    return validate(SamplingConfig, {"max_tokens": max(room, 1), **asked}, "sampling_params")


def stop_of(given: SamplingParams) -> Stop:
    """Return what ends a row, from ``stop``: None, a text, texts or tokens."""
    stop = given.stop
    if stop is None:
        return Stop()
    if isinstance(stop, str):
        return Stop(texts=(stop,), is_default=False)
    texts = tuple(sorted(each for each in stop if isinstance(each, str)))
    tokens = tuple(sorted(each for each in stop if isinstance(each, int)))
    return Stop(texts=texts, tokens=tokens, is_default=False)


class SnapshotSampler:
    """The sampling of every snapshot.

    Args:
        base: the base model.
        max_rows: rows of a pass.
    """

    def __init__(self, base: SharedBase, *, max_rows: int) -> None:
        self._base, self._max_rows = base, max_rows
        self._batchers: dict[tuple[str, Stop], Batcher] = {}
        self._waiting: dict[tuple[str, Stop], deque[tuple[Snapshot, SampleRequest]]] = {}
        self._idle: dict[tuple[Shape | None, Stop], list[EngineQueue]] = defaultdict(list)
        self._order = deque[tuple[Shape | None, Stop]]()
        self._loaded = 0

    @property
    def busy(self) -> list[tuple[str, Stop]]:
        """Keys of the batches that have rows."""
        return [*self._batchers]

    def put(self, snapshot: Snapshot, request: SampleRequest) -> None:
        """Begin a request."""
        key = snapshot.key, request.stop
        if key not in self._batchers and len(self._batchers) >= MOST_BATCHERS:
            self._waiting.setdefault(key, deque()).append((snapshot, request))
            return
        if key not in self._batchers:
            queue = self._engine(snapshot.shape, request.stop)
            self._loaded += 1
            queue.load(self._loaded, {})
            self._batchers[key] = Batcher(queue, snapshot, request.stop)
        self._batchers[key].put(request)

    def turn(self, key: tuple[str, Stop], between: Callable[[], None] = lambda: None) -> None:
        """Run passes of a batch, for at most ``SLICE_S``.

        Args:
            key: the batch.
            between: called before each pass; it may begin requests, also of this batch.

        Raises:
            Exception: the engine is broken; its requests were told.
        """
        slice_s = SLICE_S / len(self._batchers)  # a turn of all of them takes as long as one alone
        batcher, until = self._batchers[key], time.monotonic() + slice_s
        try:
            while True:
                between()
                self._base.enter(batcher.snapshot.shape, batcher.snapshot.key, batcher.snapshot.weights)
                if not batcher.turn():
                    break
                if time.monotonic() > until:
                    return
        except RillflowError as error:
            logger.warning("%s", error)  # the rows at fault were told; the others continue
            return
        except Exception as error:  # every waiting client is told before the error goes on
            del self._batchers[key]
            why = f"{type(error).__name__}: {error}"
            batcher.fail(StreamError("the engine failed", why, "read the server's log"))
            self._begin_waiting()
            raise
        del self._batchers[key]
        self._keep((batcher.snapshot.shape, key[1]), batcher.queue)
        self._begin_waiting()

    def _begin_waiting(self) -> None:
        """Begin the requests of the snapshot and stop that have waited longest."""
        if self._waiting and len(self._batchers) < MOST_BATCHERS:
            for snapshot, request in self._waiting.pop(next(iter(self._waiting))):
                if not request.is_left:
                    self.put(snapshot, request)

    def fail(self, error: RillflowError) -> None:
        """End every request with this error."""
        for batcher in self._batchers.values():
            batcher.fail(error)
        for waiting in self._waiting.values():
            for _, request in waiting:
                request.finish(error)
        self._batchers.clear()
        self._waiting.clear()

    def wake(self) -> None:
        """Remove the rows whose clients have left at the next turn."""
        for batcher in self._batchers.values():
            batcher.queue.wake()

    def _engine(self, shape: Shape | None, stop: Stop) -> EngineQueue:
        kept = self._idle[shape, stop]
        if kept:
            return kept.pop()
        if shape is not None:
            self._base.enter(shape, "zeros", _zeros(self._base, shape))
        else:
            self._base.enter(None, None, {})
        model = self._base.model
        engine = NativeEngine(
            model.module,
            RolloutConfig(max_rows=self._max_rows, deterministic=True, stop=stop.texts),
            seed=0,
            context=model.context,
            **_ends(model, stop),
        )
        return EngineQueue(engine, model.tokenizer, max_rows=self._max_rows)

    def _keep(self, kind: tuple[Shape | None, Stop], queue: EngineQueue) -> None:
        """Keep an engine for later requests; drop the one that was kept first if there are too many."""
        self._idle[kind].append(queue)
        self._order.append(kind)
        while sum(map(len, self._idle.values())) > _IDLE_ENGINES:
            oldest = self._order.popleft()
            if self._idle[oldest]:
                self._idle[oldest].pop(0).close()


def _ends(model: LanguageModel, stop: Stop) -> dict[str, Any]:
    """Return the engine's arguments for what ends a row."""
    found = Stops(stop.texts, model.tokenizer)
    tokens = found.tokens if stop.is_default else (found.tokens - model.tokenizer.stop_tokens)
    own = {model.tokenizer.token_of(text) for text in stop.texts} - {None}
    return {"stop_tokens": frozenset({*tokens, *stop.tokens, *own}), "stops": found}


def _zeros(base: SharedBase, shape: Shape) -> dict[str, Tensor]:
    return {name: torch.zeros(size) for name, size in base.names(shape).items()}


class Batcher:
    """The rows of one snapshot in one engine.

    Args:
        queue: an engine without rows.
        snapshot: the weights.
        stop: what ends the rows.
    """

    def __init__(self, queue: EngineQueue, snapshot: Snapshot, stop: Stop) -> None:
        self.queue, self.snapshot, self._stop = queue, snapshot, stop
        self._running = dict[tuple[int, int], SampleRequest]()
        self._waiting = deque[SampleRequest]()

    def put(self, request: SampleRequest) -> None:
        """Begin a request; one with the random numbers of a running one waits for its end."""
        if request.group in self._running:
            self._waiting.append(request)
            return
        self._running[request.group] = request
        epoch, prompt = request.group
        sampling = request.sampling.model_copy(update={"stop": self._stop.texts})
        self.queue.put(
            *(
                Wanted(
                    begin=Rollout.start(RowId(epoch, prompt, sample), request.prompt),
                    sampling=sampling,
                    stops=(),
                    is_streamed=False,
                    tell=partial(self._told, request, sample),
                    name=request.name,
                    is_left=lambda: request.is_left or request.is_over,
                )
                for sample in range(request.count)
            )
        )

    def turn(self) -> bool:
        """Run a pass; return whether rows are left."""
        for group, request in [*self._running.items()]:
            if request.is_left or request.is_over:
                del self._running[group]
                self.queue.wake()
        again, self._waiting = self._waiting, deque()
        for request in again:
            self.put(request)
        runs = self.queue.turn()
        return runs or bool(self._waiting) or any(not each.is_over for each in self._running.values())

    def fail(self, error: RillflowError) -> None:
        """End every request, because the engine is broken."""
        for request in (*self._running.values(), *self._waiting):
            request.finish(error)
        self.queue.close()

    def _told(self, request: SampleRequest, sample: int, told: Told, is_over: bool) -> None:
        if isinstance(told, RillflowError):
            request.finish(told)
        elif is_over:
            request.ended[sample] = told
            if len(request.ended) == request.count:
                request.finish([request.ended[index] for index in range(request.count)])


def sequence_of(rollout: Rollout, prompt: int) -> tuple[bool, Sequence[int], Sequence[float]]:
    """Return a sample as the wire has it: whether it was stopped, its tokens, their log probabilities."""
    return rollout.finish is Finish.STOP, rollout.tokens[prompt:], rollout.logprobs[prompt:]
