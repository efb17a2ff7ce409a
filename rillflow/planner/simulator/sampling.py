"""Sampling: the replicas of a pool that never wait for one another, and the weights each of them has.

admission ─ a group may begin ─> its rows, one by one ─> the replica with the fewest rows
new weights ─┬─ interrupts ──> every replica stands still, reads its prefixes again and goes on under them
             └─ else ────────> a replica takes them when it has no rows: it gets none that it may not begin

consumes        prompts, without end; versions of the weights
waits for       a slot and room in a cache; the admission
unblocked by    a row that ends, a batch that is formed, weights that arrive
produces        complete groups, spans of the replicas with the cause of their idleness
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from rillflow.planner.simulator.admission import Admission, Group
from rillflow.planner.simulator.book import Book
from rillflow.planner.simulator.draws import Row
from rillflow.planner.simulator.layout import Layout
from rillflow.planner.simulator.replica import Replica
from rillflow.planner.simulator.result import Cause


@dataclass(kw_only=True, slots=True)
class _Lane:
    """A replica, and what it has been doing since when; without a cause it works."""

    replica: Replica
    version: int = 0
    since_s: float = 0.0
    held_s: float = 0.0
    cause: Cause | None = Cause.FRESHNESS


class Sampling:
    """Replicas that sample without end.

    Args:
        layout: what is simulated.
        admission: which groups may begin.
        book: where spans are written.
        load_s: seconds for which a replica stands still when it takes new weights.
    """

    def __init__(self, layout: Layout, admission: Admission, book: Book, *, load_s: float) -> None:
        stage = next(iter(layout.generating))
        self.newest = 0
        self.begun = 0
        self.live: dict[int, Group] = {}
        self._layout = layout
        self._admission = admission
        self._book = book
        self._load_s = load_s
        self._pool = layout.pool_of(stage)
        self._name = layout.problem.graph.stages[stage].name
        self._lanes = [_Lane(replica=replica) for replica in layout.replicas(stage)]
        self._draws = layout.draws()
        self._waiting: deque[Row] = deque()
        self._homes: dict[tuple[int, int], int] = {}
        self._prompt = 0
        self._changed: set[int] = set()
        self._empty = dict.fromkeys(range(len(self._lanes)))

    @property
    def peak_tokens(self) -> float:
        """The most tokens a replica's cache held."""
        return max(lane.replica.peak_tokens for lane in self._lanes)

    def changes(self) -> Iterator[tuple[float, int]]:
        """The next event, and its place, of each replica that changed since this was asked last."""
        for place in sorted(self._changed):
            if self._lanes[place].replica.next_s < math.inf:
                yield self._lanes[place].replica.next_s, place
        self._changed.clear()

    def advance(self, place: int, now_s: float) -> list[Group]:
        """Let a replica come to its next event, unless it changed since; the groups complete by that."""
        if self._lanes[place].replica.next_s != now_s:
            return []
        return self._pass(place, now_s)

    def publish(self, version: int, now_s: float) -> list[Group]:
        """Take note of new weights; the groups complete at this very moment."""
        self.newest = version
        complete = []
        if self._layout.interrupts:
            for place, lane in enumerate(self._lanes):
                complete += self._pass(place, now_s)
                self._load(place, lane, now_s, reads_again=True)
        return complete

    def begin(self, now_s: float) -> None:
        """Begin all that may and can begin, and let replicas without rows take the newest weights."""
        while self._begin_one(now_s) or self._refresh(now_s):
            pass
        cause = self._cause()
        for place in self._empty:
            self._mark(place, now_s, cause)

    def close(self, end_s: float) -> None:
        """Write down what replicas do at the end."""
        for place in range(len(self._lanes)):
            self._mark(place, end_s, None, is_last=True)

    def _begin_one(self, now_s: float) -> bool:
        """Begin a row, of a group begun before or of a new one; whether one could."""
        least = (
            self.live[self._waiting[0].prompt].version
            if self._waiting
            else self._admission.least_version(self.newest)
        )
        if least > self.newest:
            return False
        row = self._waiting[0] if self._waiting else self._draws.rows(self._prompt)[0]
        place = self._place(row, least)
        if place is None:
            return False
        lane = self._lanes[place]
        if not self._waiting:
            self._begin_group(lane.version)
        self._waiting.popleft()
        self.live[row.prompt].versions[row.sample] = lane.version
        self._homes[row.prompt, row.sample] = place
        ended = self._pass(place, now_s)
        assert not ended, "events of this moment are over before rows begin"
        self._mark(place, now_s, None)
        lane.replica.begin([row], now_s)
        self._empty.pop(place, None)
        return True

    def _place(self, row: Row, least: int) -> int | None:
        """The replica with the fewest rows among those with weights and room for one more."""
        best, fewest = None, math.inf
        for place, lane in enumerate(self._lanes):
            replica = lane.replica
            if replica.rows < fewest and lane.version >= least and replica.has_room(row):
                best, fewest = place, replica.rows
        return best

    def _begin_group(self, version: int) -> None:
        rows = tuple(self._draws.rows(self._prompt))
        samples = self._layout.samples_begun
        group = Group(
            prompt=self._prompt,
            version=version,
            rows=rows,
            left=self._layout.problem.workload.samples,
            greedy_left=len(rows) - samples,
        )
        self.live[group.prompt] = group
        self._admission.begin(group)
        self._waiting.extend(rows)
        self._prompt += 1
        self.begun += len(rows)

    def _refresh(self, now_s: float) -> bool:
        """Let replicas without rows take the newest weights; whether any did."""
        stale = [place for place in self._empty if self._lanes[place].version < self.newest]
        for place in stale:
            self._pass(place, now_s)
            self._load(place, self._lanes[place], now_s, reads_again=False)
        return bool(stale)

    def _load(self, place: int, lane: _Lane, now_s: float, *, reads_again: bool) -> None:
        """Let new weights into a replica, which stands still meanwhile."""
        lane.version = self.newest
        self._mark(place, now_s, Cause.WEIGHTS)
        lane.held_s = now_s + self._load_s
        lane.replica.stall(self._load_s, reads_again=reads_again)
        if lane.replica.rows:
            self._mark(place, now_s, None)
        self._changed.add(place)

    def _pass(self, place: int, now_s: float) -> list[Group]:
        """Let time pass on a replica; the groups complete by that, their other rows stopped."""
        complete = []
        left = self._advance(place, now_s)
        while left:
            row = left.pop()
            group = self.live[row.prompt]
            if group.is_complete or not self._count(group, row):
                continue
            complete.append(group)
            kept = {item.sample for item in group.kept}
            for other in group.rows:
                if other.sample not in kept:
                    left += self._stop(other, now_s)
        return complete

    def _count(self, group: Group, row: Row) -> bool:
        """Count a row that ended; whether its group is complete by that."""
        if row.sample >= self._layout.samples_begun:
            group.greedy_left -= 1
        elif group.left:
            group.left -= 1
        else:
            return False
        group.kept.append(row)
        return group.is_complete

    def _stop(self, row: Row, now_s: float) -> list[Row]:
        """Stop a row that nobody waits for; rows of its replica that end at this very moment."""
        place = self._homes.get((row.prompt, row.sample))
        if place is None:
            self._waiting.remove(row)
            return []
        ended = self._advance(place, now_s)
        replica = self._lanes[place].replica
        replica.stop(row)
        if not replica.rows:
            self._empty[place] = None
        return ended

    def _advance(self, place: int, now_s: float) -> list[Row]:
        """Let time pass on a replica; the rows that ended."""
        self._changed.add(place)
        replica = self._lanes[place].replica
        ended = replica.advance(now_s)
        if not replica.rows:
            self._empty[place] = None
        return ended

    def _cause(self) -> Cause:
        """Why a replica with the newest weights has no rows."""
        freshness = self._layout.plan.freshness
        return Cause.WEIGHTS if self.newest + freshness < self._admission.batch else Cause.FRESHNESS

    def _mark(self, place: int, now_s: float, cause: Cause | None, *, is_last: bool = False) -> None:
        """Write down what a replica did until now, if it does something else from now on, or from when it has
        its weights."""
        lane = self._lanes[place]
        if lane.cause is cause and not is_last:
            return
        step, until_s = lane.version + 1, max(now_s, lane.held_s)
        if lane.cause is None:
            self._book.work(self._pool, place + 1, self._name, step, lane.since_s, until_s)
        else:
            self._book.idle(self._pool, place + 1, lane.cause, step, lane.since_s, until_s)
        lane.cause, lane.since_s = cause, until_s
