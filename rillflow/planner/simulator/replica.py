"""Replica: one copy that decodes with continuous batching, as a state that time moves on.

    begin(row) ─> waiting ─ slot and cache free ─> running ─ as many tokens as it has ─> ended
                     └──────── cache full: the newest row's cache is given up ────┘

All running rows gain tokens at the same pace, so a row's end is a mark on one common scale, and between two
ends, a *segment*, nothing happens: the next event is the least mark, or the token at which the cache is full.

consumes        rows that begin
waits for       a slot (``most_rows``) and room in the cache (``capacity_tokens``)
unblocked by    a row that ends
produces        rows that ended, at ``next_s``

Within a segment tokens come evenly; that matters only when something from outside falls into one.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque

from rillflow.errors import PlanError
from rillflow.planner.cost_model.generation import Decoder
from rillflow.planner.simulator.draws import Row

_WATERMARK = 0.01
"""The share of the cache that stays free when a row is let in, as engines keep it."""


class Replica:
    """A copy that decodes.

    Args:
        decoder: what tokens cost.
        slow: how many times as long it takes as the decoder says.
        shares_prompts: whether rows of a prompt read it once.
    """

    def __init__(self, decoder: Decoder, *, slow: float = 1.0, shares_prompts: bool = False) -> None:
        self.next_s = math.inf
        """When its next event is."""
        self.peak_tokens = 0.0
        """The most its cache held."""
        self._decoder = decoder
        self._slow = slow
        self._shares = shares_prompts
        self._running: list[tuple[float, int, Row]] = []
        """A heap: where on the common scale a row ends, how many entered before it, the row."""
        self._waiting: deque[tuple[Row, float]] = deque()
        """Rows without a slot, and the tokens that each has still to sample."""
        self._read = Counter[int]()
        self._entered = 0
        self._gained = self._context = self._now_s = self._stall_s = 0.0
        self._segment_s = self._segment_tokens = 0.0

    @property
    def rows(self) -> int:
        """Rows that run or wait in it."""
        return len(self._running) + len(self._waiting)

    def has_room(self, row: Row) -> bool:
        """Whether a row that begins now would run at once."""
        return self.rows < self._decoder.most_rows and not self._waiting and self._fits(row.prompt_tokens)

    def begin(self, rows: list[Row], now_s: float) -> None:
        """Let rows begin as soon as there is room; ``advance`` comes first where time has passed."""
        for row in rows:
            tokens, most = row.prompt_tokens + row.response_tokens, self._decoder.capacity_tokens
            if tokens > most:
                raise PlanError(
                    f"a row of {tokens} tokens does not fit into a replica's cache of {most:.0f}",
                    why="a row's whole context stays in the cache until it ends",
                    fix="share a copy among more devices, or lower the longest response",
                )
            self._waiting.append((row, row.response_tokens))
        self._now_s = now_s
        self._admit()
        self._plan()

    def advance(self, now_s: float) -> list[Row]:
        """Let time pass until ``now_s``, at most ``next_s``; the rows that ended."""
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
        """Drop a row that runs or waits; ``advance`` comes first where time has passed."""
        for one in [one for one in self._running if one[2] is row]:
            self._drop(one)
        self._waiting = deque(item for item in self._waiting if item[0] is not row)
        self._admit()
        self._plan()

    def stall(self, seconds: float) -> None:
        """Stand still while weights arrive; rows keep their cache."""
        self._stall_s += seconds
        self._plan()

    def _gain(self, tokens: float) -> None:
        self._gained += tokens
        self._context += tokens * len(self._running)
        self.peak_tokens = max(self.peak_tokens, self._context)

    def _leave(self, row: Row, mark: float) -> None:
        """Take the tokens of a row out of the cache."""
        self._read[row.prompt] -= 1
        held = row.prompt_tokens + row.response_tokens - (mark - self._gained)
        self._context = self._context - held if self._running else 0.0

    def _give_up_newest(self) -> None:
        """Make room in a full cache: the newest row waits again, first in line."""
        newest = max(self._running, key=lambda one: one[1])
        self._drop(newest)
        self._waiting.appendleft((newest[2], max(round(newest[0] - self._gained), 1)))

    def _drop(self, running: tuple[float, int, Row]) -> None:
        """Take a row out of its slot before it has ended."""
        self._running.remove(running)
        heapq.heapify(self._running)
        self._leave(running[2], running[0])

    def _fits(self, tokens: float) -> bool:
        """Whether so many tokens fit into the cache; alone a row always does."""
        return not self._running or self._context + tokens <= self._decoder.capacity_tokens * (1 - _WATERMARK)

    def _admit(self) -> None:
        """Let waiting rows in, in order, and read their prompts, each once where rows share it."""
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
            heapq.heappush(self._running, (self._gained + left, self._entered, row))
            self._context += row.prompt_tokens + done
            self.peak_tokens = max(self.peak_tokens, self._context)
        if fresh:
            self._stall_s += self._slow * self._decoder.prefill_s(fresh)

    def _plan(self) -> None:
        """Find the next event: the least mark, or the token at which the cache is full."""
        count = len(self._running)
        if not count:
            self.next_s = math.inf
            return
        tokens = max(self._running[0][0] - self._gained, 0.0)
        room = math.floor((self._decoder.capacity_tokens - self._context) / count + 1e-6)
        if count > 1 and room < tokens:
            tokens = max(float(room), 0.0)
        self._segment_tokens = tokens
        self._segment_s = self._slow * self._decoder.advance_s(count, self._context, tokens)
        self.next_s = self._now_s + self._stall_s + self._segment_s
