"""Replica: one copy that decodes with continuous batching, as a state that time moves on.

    begin(row) ─> waiting ─ slot and cache free ─> running ─ as many tokens as it has ─> ended
                     └──────── cache full: the newest row's cache is given up ────┘

All running rows gain tokens at the same pace, so a row's end is a mark on one common scale, and between two
ends, a *segment*, nothing happens: the next event is the least mark, or the token at which the cache is full.

consumes        rows that begin
waits for       a slot (``most_rows``) and room in the cache (``capacity_tokens``)
unblocked by    a row that ends or is stopped
produces        rows that ended, at ``next_s``

Within a segment tokens come evenly; that matters only when something from outside falls into one.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass

from rillflow.errors import PlanError
from rillflow.planner.cost_model.generation import Decoder
from rillflow.planner.simulator.draws import Row

_WATERMARK = 0.01
"""The share of the cache that stays free when a row is let in, as engines keep it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """A row in its slot, or without one."""

    row: Row
    at: float
    """Where on the common scale it ends; of a row that waits, the tokens it has still to sample."""


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
        self.rows = 0
        """Rows that run or wait in it."""
        self.peak_tokens = 0.0
        """The most its cache held."""
        self._decoder = decoder
        self._slow = slow
        self._shares = shares_prompts
        self._capacity = float(decoder.capacity_tokens)
        self._most_rows = decoder.most_rows
        self._running: dict[tuple[int, int], _Place] = {}
        self._waiting: deque[_Place] = deque()
        self._marks: list[tuple[float, int, int]] = []
        self._read: dict[int, int] = {}
        self._gained = 0.0
        self._context = 0.0
        self._now_s = 0.0
        self._stall_s = 0.0
        self._segment_s = 0.0
        self._segment_tokens = 0.0

    def has_room(self, row: Row) -> bool:
        """Whether a row that begins now would run at once."""
        return self.rows < self._most_rows and not self._waiting and self._fits(row.prompt_tokens)

    def begin(self, rows: list[Row], now_s: float) -> None:
        """Let rows begin as soon as there is room; ``advance`` comes first where time has passed."""
        for row in rows:
            if row.prompt_tokens + row.response_tokens > self._capacity:
                raise _too_long(row, self._capacity)
            self._waiting.append(_Place(row=row, at=row.response_tokens))
        self.rows += len(rows)
        self._now_s = now_s
        self._admit()
        self._plan()

    def advance(self, now_s: float) -> list[Row]:
        """Let time pass until ``now_s``, at most ``next_s``; the rows that ended."""
        passed = now_s - self._now_s
        self._now_s = now_s
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
        ended = self._ended()
        if not ended:
            self._give_up_newest()
        elif self._waiting:
            self._admit()
        self._plan()
        return ended

    def stop(self, row: Row) -> None:
        """Drop a row that runs or waits; ``advance`` comes first where time has passed."""
        key = (row.prompt, row.sample)
        if key in self._running:
            self._leave(self._running[key])
            self._admit()
            self._plan()
        else:
            self._waiting = deque(item for item in self._waiting if item.row != row)
        self.rows = len(self._running) + len(self._waiting)

    def stall(self, seconds: float, *, reads_again: bool) -> None:
        """Stand still while weights arrive; with ``reads_again`` every prefix is then read under them."""
        again = self._decoder.prefill_s(self._context) if reads_again and self._running else 0.0
        self._stall_s += seconds + self._slow * again
        self._plan()

    def _gain(self, tokens: float) -> None:
        self._gained += tokens
        self._context += tokens * len(self._running)
        self.peak_tokens = max(self.peak_tokens, self._context)

    def _ended(self) -> list[Row]:
        """The rows at or before the common mark, which leave."""
        ended = []
        while self._marks and self._marks[0][0] <= self._gained + 1e-6:
            mark, prompt, sample = heapq.heappop(self._marks)
            running = self._running.get((prompt, sample))
            if running is not None and running.at == mark:
                self._leave(running)
                ended.append(running.row)
        self.rows -= len(ended)
        return ended

    def _leave(self, running: _Place) -> int:
        """Take a row out of its slot; the tokens it had still to sample."""
        row = running.row
        del self._running[row.prompt, row.sample]
        left = max(round(running.at - self._gained), 0)
        self._context -= row.prompt_tokens + row.response_tokens - (running.at - self._gained)
        self._read[row.prompt] -= 1
        if not self._read[row.prompt]:
            del self._read[row.prompt]
        if not self._running:
            self._context = 0.0
        return left

    def _give_up_newest(self) -> None:
        """Make room in a full cache: the newest row waits again, first in line."""
        newest = next(reversed(self._running.values()))
        self._waiting.appendleft(_Place(row=newest.row, at=max(self._leave(newest), 1)))

    def _fits(self, tokens: float) -> bool:
        """Whether so many tokens fit into the cache; alone a row always does."""
        return not self._running or self._context + tokens <= self._capacity * (1.0 - _WATERMARK)

    def _admit(self) -> None:
        """Let waiting rows in, in order, and read their prompts."""
        fresh = 0.0
        while self._waiting and len(self._running) < self._most_rows:
            item = self._waiting[0]
            done = item.row.response_tokens - item.at
            if not self._fits(item.row.prompt_tokens + done):
                break
            self._waiting.popleft()
            fresh += self._enter(item, done)
        if fresh:
            self._stall_s += self._slow * self._decoder.prefill_s(fresh)

    def _enter(self, item: _Place, done: float) -> float:
        """Give a row its slot; the tokens that are to be read for it."""
        row = item.row
        mark = self._gained + item.at
        self._running[row.prompt, row.sample] = _Place(row=row, at=mark)
        heapq.heappush(self._marks, (mark, row.prompt, row.sample))
        known = self._read.get(row.prompt, 0)
        self._read[row.prompt] = known + 1
        self._context += row.prompt_tokens + done
        self.peak_tokens = max(self.peak_tokens, self._context)
        return done if known and self._shares else row.prompt_tokens + done

    def _plan(self) -> None:
        """Find the next event: the least mark, or the token at which the cache is full."""
        count = len(self._running)
        if not count:
            self.next_s = math.inf
            return
        while self._is_stale(self._marks[0]):
            heapq.heappop(self._marks)
        tokens = max(self._marks[0][0] - self._gained, 0.0)
        room = math.floor((self._capacity - self._context) / count + 1e-6)
        if count > 1 and room < tokens:
            tokens = max(float(room), 0.0)
        self._segment_tokens = tokens
        self._segment_s = (
            self._slow * self._decoder.advance_s(count, self._context, tokens) if tokens else 0.0
        )
        self.next_s = self._now_s + self._stall_s + self._segment_s

    def _is_stale(self, mark: tuple[float, int, int]) -> bool:
        running = self._running.get((mark[1], mark[2]))
        return running is None or running.at != mark[0]


def _too_long(row: Row, capacity: float) -> PlanError:
    tokens = row.prompt_tokens + row.response_tokens
    return PlanError(
        f"a row of {tokens} tokens does not fit into a replica's cache of {capacity:.0f}",
        why="a row's whole context stays in the cache until it ends",
        fix="share a copy among more devices, or lower the longest response",
    )
