"""EnvironmentEngine: an engine whose rows are written by the policy and an environment in turns.

    rows ─> pool: reset ── observation ──> engine ── a turn has ended ──> pool: step ──┐
    row  <─ the episode has ended, or failed   ^                                       │
                                               └──────────── observation <─────────────┘

A row leaves the inner engine while its environment works, so other rows take its slot. The native engine
gives the row its KV cache, and reads only the new tokens when the row returns.

Loop (``step``, in the thread of the sampler's rank)
    consumes      added rows; rows whose turn has ended; answers of environments
    waits for     if no row can be sampled: an answer, or the next deadline of a call. If most rows have
                  just been given to their environments: their answers, at most half a pass long, because a
                  pass of all rows costs little more than a pass of a few
    unblocked by  either; a call of an environment has ``timeout_s``
    produces      each row once: its turns, with the environment's reward or its failure
    shuts down    ``close``: the environment processes end; the driver's death ends them, kill -9 included
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import lru_cache
from heapq import nsmallest
from typing import Any

from torch import Tensor, nn

from rillflow.errors import RillflowError
from rillflow.records.rollout import Rollout
from rillflow.records.row import RowId
from rillflow.rewards.outcome import Outcome
from rillflow.rollout.config import RolloutConfig
from rillflow.rollout.engine_wrapper import LONGEST_WAIT_S, EngineWrapper
from rillflow.tasks.encoded import Encoder
from rillflow_parts.endpoint.tool_calls import tool_format
from rillflow_parts.environments.config import EnvironmentConfig
from rillflow_parts.environments.episode import Episode
from rillflow_parts.environments.pool import EnvironmentPool, Told
from rillflow_parts.environments.source import EnvironmentSource

LONGEST_GATHER_S = 0.005
"""Longest wait in seconds for answers while rows could be sampled."""
FED_ROWS = 2
"""Rows given to the inner engine, as a multiple of ``max_rows``: its workers do not share their slots."""
KNOWN_TEXTS = 1024
"""Observations whose tokens are kept: many environments say the same."""


class EnvironmentEngine(EngineWrapper):
    """An engine, and the environments that answer it.

    Args: see EngineWrapper; and
        environment: its settings.
        source: where its class is.
        encoder: encodes what it says.
    """

    def __init__(
        self,
        module: nn.Module,
        config: RolloutConfig,
        *,
        environment: EnvironmentConfig,
        source: EnvironmentSource,
        encoder: Encoder,
        context: int,
        **given: Any,
    ) -> None:
        super().__init__(module, config.with_returned_cache(), context=context, **given)
        self._max_turns, self._context, self._encoder = environment.max_turns, context, encoder
        self._tools = tool_format(config.tool_format, encoder.tokenizer)
        self._encode = lru_cache(KNOWN_TEXTS)(self._encoded)
        self._pool = EnvironmentPool(source, environment)
        self._acting: dict[int, Episode] = {}  # by number; in the environment
        self._ready: dict[int, Episode] = {}  # by number; to be sampled
        self._sampling: dict[RowId, int] = {}  # number by row; in the inner engine
        self._episodes: dict[int, Episode] = {}
        self._pass_s, self._version = 0.0, -1
        self.idle_s = 0.0
        """Seconds that ``step`` waited for environments."""
        self._stack.callback(self._pool.close)

    @property
    def has_work(self) -> bool:
        """See Engine."""
        return bool(self._waiting or self._episodes)

    @property
    def held_bytes(self) -> int:
        """See Engine."""
        caches = (each.row.cache for each in self._episodes.values())
        return super().held_bytes + sum(each.nbytes for each in caches if each is not None)

    def load(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """See Engine."""
        self._inner.load(version, weights)
        if version != self._version and not self._config.keep_cache:
            for episode in self._episodes.values():
                episode.drop_cache()  # computed with the old weights
        self._version = version

    def step(self) -> list[Rollout]:
        """See Engine; run one pass, or wait for an environment."""
        self._begin()
        self._feed()
        if self._inner.has_work:
            begun = time.monotonic()
            for rollout in self._inner.step():
                number = self._sampling.pop(rollout.row)
                episode = self._acting[number] = self._episodes[number]
                text = episode.answered(rollout)
                self._pool.step(number, text, episode.message())
            took = time.monotonic() - begun
            self._pass_s = took if not self._pass_s else 0.9 * self._pass_s + 0.1 * took
        return self._gathered()

    def _taken_out(self, row: RowId) -> Rollout:
        number = next(number for number, each in self._episodes.items() if each.start.row == row)
        if self._sampling.pop(row, None) is not None:
            self._inner.abort(row)
        self._ready.pop(number, None)
        return self._leave(number).start

    def _clear(self) -> None:
        self._waiting.clear()
        for row in [*self._sampling] if self._inner.has_work else ():  # a failed pass has emptied it
            self._inner.abort(row)
        self._sampling.clear()
        self._ready.clear()
        for number in [*self._episodes]:
            self._leave(number)
        self._pool.flush()

    def _begin(self) -> None:
        """Reset environments for waiting rows, as many as the processes can hold."""
        while self._waiting and self._pool.room > 0:
            start, sampling = self._waiting.popleft()
            episode = Episode(
                start,
                sampling,
                self._encoder,
                encode=self._encode,
                tools=self._tools,
                context=self._context,
                max_turns=self._max_turns,
            )
            number = self._pool.begin(episode.columns)
            self._episodes[number] = self._acting[number] = episode

    def _feed(self) -> None:
        """Let the inner engine sample rows: new ones first, then those whose environments take longest.

        So the slow environments work while the rows of the fast ones are sampled.
        """
        room = FED_ROWS * self._config.max_rows - len(self._sampling)
        for number in nsmallest(room, self._ready, key=lambda each: -self._ready[each].environment_s):
            episode = self._ready.pop(number)
            self._sampling[episode.row.row] = number
            self._inner.add(episode.row, episode.sampling)

    def _encoded(self, text: str) -> list[int]:
        return self._encoder.tokenizer.encode_more(text, is_rendered=self._encoder.is_rendered)

    def _gathered(self) -> list[Rollout]:
        """Take the answers of environments; return the rows that have ended."""
        begun = time.monotonic()
        ended = self._taken(0.0 if self._sampling or self._ready else LONGEST_WAIT_S)
        until = begun + min(LONGEST_GATHER_S, self._pass_s / 2)
        while (now := time.monotonic()) < until and self._is_worth_waiting(until):
            ended += self._taken(until - now)
        self.idle_s += time.monotonic() - begun
        return ended

    def _is_worth_waiting(self, until: float) -> bool:
        """Return whether more rows than are being sampled were just given to their environments."""
        fresh = until - 2 * LONGEST_GATHER_S
        given = sum(each.since > fresh for each in self._acting.values())
        return given > len(self._sampling) + len(self._ready)

    def _taken(self, wait_s: float) -> list[Rollout]:
        ended = [self._answered(told) for told in self._pool.turn(wait_s)]
        return [row for row in ended if row is not None]

    def _answered(self, told: Told) -> Rollout | None:
        """Continue a row with what its environment said; return the row if it has ended."""
        episode = self._acting.pop(told.row)
        if told.failed is not None:
            return self._leave(told.row).failed(*told.failed)
        is_first = episode.row is episode.start
        try:
            row = episode.begin(told) if is_first else episode.observed(told)
        except RillflowError as error:
            what = f"the row cannot go on after what the environment said: {error.what}"
            return self._leave(told.row).failed(Outcome.ERROR, f"{what} ({error.why})")
        if row is None:
            return self._leave(told.row).ended()
        self._ready[told.row] = episode
        return None

    def _leave(self, number: int) -> Episode:
        self._acting.pop(number, None)
        self._pool.leave(number)
        return self._episodes.pop(number)
