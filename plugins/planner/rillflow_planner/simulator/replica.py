"""Replica: one model copy that decodes with continuous batching, as a state that advances in time.

    begin(row) ─> waiting ─ slot and cache free ─> running ─ all tokens sampled ─> ended
                     └─── cache full: the newest row is preempted ─────┘

All running rows gain tokens at the same pace, so the end of a row is a mark on one common scale. Nothing
happens in a *segment* between two events. The next event is the lowest mark, or the token that fills the
cache.

consumes        rows that begin
waits for       a slot (``most_rows``) and room in the cache (``capacity_tokens``)
unblocked by    a row that ends
produces        rows that ended, at ``next_s``

Within a segment tokens arrive evenly; this only matters if an external event interrupts a segment.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque

from rillflow.errors import PlanError
from rillflow_planner.cost_model.generation import Decoder
from rillflow_planner.simulator.draws import Row

_WATERMARK = 0.01
"""Share of the cache that must stay free when a row is admitted, as in inference engines."""


class Replica:
    """A copy that decodes.

    Args:
        decoder: cost of tokens.
        shares_prompts: whether rows of a prompt share its prefill.
    """

    def __init__(self, decoder: Decoder, *, shares_prompts: bool = False) -> None:
        self.next_s = math.inf
        """Time of its next event."""
        self.peak_tokens = 0.0
        """Largest number of tokens in its cache so far."""
        self._decoder = decoder
        self._shares = shares_prompts
        self._running: list[tuple[float, int, Row]] = []
        """Heap of running rows: end mark on the common scale, order of entry, row."""
        self._waiting: deque[tuple[Row, float]] = deque()
        """Rows without a slot, with the tokens that each has left to sample."""
        self._read = Counter[int]()
        self._entered = 0
        self._gained = self._context = self._now_s = self._stall_s = 0.0
        self._segment_s = self._segment_tokens = 0.0

    @property
    def rows(self) -> int:
        """Number of running and waiting rows."""
        return len(self._running) + len(self._waiting)

    def has_room(self, row: Row) -> bool:
        """Return whether a row that begins now would run immediately."""
        return self.rows < self._decoder.most_rows and not self._waiting and self._fits(row.prompt_tokens)

    def begin(self, rows: list[Row], now_s: float) -> None:
        """Begin rows as soon as there is room; call ``advance`` first if time has passed."""
        for row in rows:
            tokens, most = row.prompt_tokens + row.response_tokens, self._decoder.capacity_tokens
            if tokens > most:
                raise PlanError(
                    f"a row of {tokens} tokens does not fit into a replica's KV cache of {most:.0f} tokens",
                    why="the whole context of a row stays in the cache until the row ends",
                    fix="raise generate_tp, or lower the longest response",
                )
            self._waiting.append((row, row.response_tokens))
        self._now_s = now_s
        self._stall_s += 0.0 if self._running else self._decoder.begin_s
        self._admit()
        self._plan()

    def advance(self, now_s: float) -> list[Row]:
        """Advance time to ``now_s``, at most ``next_s``, and return the rows that ended."""
        passed, self._now_s = now_s - self._now_s, now_s
        if not self._running:
            self._stall_s = max(self._stall_s - passed, 0.0)
            return []
        if now_s < self.next_s:
            stalled = min(passed, self._stall_s)
            self._stall_s -= stalled
            share = (passed - stalled) / self._segment_s if self._segment_s else 0.0
            self._gain(self._segment_tokens * min(share, 1.0))
            self._plan()
            return []
        self._stall_s = 0.0
        self._gain(self._segment_tokens)
        ended = []
        while self._running and self._running[0][0] <= self._gained + 1e-6:
            mark, _, row = heapq.heappop(self._running)
            self._leave(row, mark)
            ended.append(row)
        if ended:
            self._admit()
        else:
            self._give_up_newest()
        self._plan()
        return ended

    def stop(self, row: Row) -> None:
        """Drop a running or waiting row; call ``advance`` first if time has passed."""
        for one in [one for one in self._running if one[2] is row]:
            self._drop(one)
        self._waiting = deque(item for item in self._waiting if item[0] is not row)
        self._admit()
        self._plan()

    def stall(self, seconds: float) -> None:
        """Pause while weights arrive; rows keep their cache."""
        self._stall_s += seconds
        self._plan()

    def _gain(self, tokens: float) -> None:
        self._gained += tokens
        self._context += tokens * len(self._running)
        self.peak_tokens = max(self.peak_tokens, self._context)

    def _leave(self, row: Row, mark: float) -> None:
        """Remove the tokens of a row from the cache."""
        self._read[row.prompt] -= 1
        held = row.prompt_tokens + row.response_tokens - (mark - self._gained)
        self._context = self._context - held if self._running else 0.0

    def _give_up_newest(self) -> None:
        """Make room in a full cache: preempt the newest row, which then waits first in line."""
        newest = max(self._running, key=lambda one: one[1])
        self._drop(newest)
        self._waiting.appendleft((newest[2], max(round(newest[0] - self._gained), 1)))

    def _drop(self, running: tuple[float, int, Row]) -> None:
        """Remove a row from its slot before it has ended."""
        self._running.remove(running)
        heapq.heapify(self._running)
        self._leave(running[2], running[0])

    def _fits(self, tokens: float) -> bool:
        """Return whether these tokens fit into the cache; a single row always does."""
        return not self._running or self._context + tokens <= self._decoder.capacity_tokens * (1 - _WATERMARK)

    def _admit(self) -> None:
        """Admit waiting rows in order and prefill their prompts, shared ones once.

        A row that continues after it was preempted was admitted before.
        """
        fresh = 0.0
        while self._waiting and len(self._running) < self._decoder.most_rows:
            row, left = self._waiting[0]
            done = row.response_tokens - left
            if not self._fits(row.prompt_tokens + done):
                break
            self._waiting.popleft()
            fresh += done if self._shares and self._read[row.prompt] else row.prompt_tokens + done
            self._read[row.prompt] += 1
            self._entered += 1
            self._stall_s += 0.0 if done else self._decoder.row_begin_s
            heapq.heappush(self._running, (self._gained + left, self._entered, row))
            self._context += row.prompt_tokens + done
            self.peak_tokens = max(self.peak_tokens, self._context)
        if fresh:
            self._stall_s += self._decoder.prefill_s(fresh)

    def _plan(self) -> None:
        """Find the next event: the lowest mark, or the token that fills the cache."""
        count = len(self._running)
        if not count:
            self.next_s = math.inf
            return
        tokens = max(self._running[0][0] - self._gained, 0.0)
        room = math.floor((self._decoder.capacity_tokens - self._context) / count + 1e-6)
        if count > 1 and room < tokens:
            tokens = max(float(room), 0.0)
        self._segment_tokens = tokens
        self._segment_s = self._decoder.advance_s(count, self._context, tokens)
        self.next_s = self._now_s + self._stall_s + self._segment_s
