"""Sampling: replicas and the groups of rows on them, in a round of a step or without end.

prompts ─ rows ─> replicas ─ ended ─┬─> a prompt's wanted samples are there: its others are stopped
                                    └─> Round: the wanted prompts are there: it ends, the rest is put aside
new weights ─┬─ interrupts ──> Stream: every replica takes them at once, and its rows go on under them
             └─ else ────────> a replica takes them when it has no rows, or when none has any (``drains``): it
                               gets none that it may not begin

consumes        prompts: of a round, or without end; versions of the weights
waits for       a slot and room in a cache; the admission
unblocked by    a row that ends, a batch that is formed, weights that arrive
produces        complete groups, spans of the replicas with the cause of their idleness

Rounds in which more is begun than wanted: tail batching of RollPacker (arXiv 2509.21009). A row put aside has
the same length when it begins anew.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from rillflow.freshness.admission import HardBound
from rillflow.planner.simulator.draws import Row
from rillflow.planner.simulator.layout import Layout
from rillflow.planner.simulator.replica import Replica
from rillflow.planner.simulator.result import Book, IdleCause


@dataclass(kw_only=True, slots=True, eq=False)
class SampleGroup:
    """The rows of a prompt on their way."""

    prompt: int
    """Its number."""
    rows: tuple[Row, ...]
    """All that begin."""
    left: int
    """Sampled rows that are still waited for."""
    greedy_left: int
    """Greedy rows that are still waited for."""
    version: int = 0
    """The version of the policy under which its first row begins: that of its oldest token."""
    versions: dict[int, int] = field(default_factory=dict)
    """By sample: under which version it began."""
    homes: dict[int, int] = field(default_factory=dict)
    """By sample that has begun: the replica it is on."""
    kept: list[Row] = field(default_factory=list)
    """Rows that ended and were waited for."""

    @property
    def is_complete(self) -> bool:
        """Whether all that it waits for has ended."""
        return not self.left and not self.greedy_left


@dataclass(kw_only=True, slots=True)
class _Lane:
    """A replica, and why it does nothing; without a cause it works."""

    replica: Replica
    version: int = 0
    done_s: float = 0.0
    held_s: float = 0.0
    cause: IdleCause | None = IdleCause.FRESHNESS


class _Sampling:
    """Groups of rows on replicas."""

    def __init__(self, replicas: Sequence[Replica], greedy: int) -> None:
        self.lanes = [_Lane(replica=replica) for replica in replicas]
        self.live: dict[int, SampleGroup] = {}
        self._greedy = greedy
        """The sample from which on rows are greedy."""
        self._changed: set[int] = set()

    @property
    def peak_tokens(self) -> float:
        """The most tokens a replica's cache held."""
        return max(lane.replica.peak_tokens for lane in self.lanes)

    def changes(self) -> Iterator[tuple[float, int]]:
        """The next event, and its place, of each replica that changed since this was asked last."""
        for place in sorted(self._changed):
            if self.lanes[place].replica.next_s < math.inf:
                yield self.lanes[place].replica.next_s, place
        self._changed.clear()

    def advance(self, place: int, now_s: float) -> list[SampleGroup]:
        """Let a replica come to its next event, unless it changed since; the groups complete by that."""
        return self._pass(place, now_s) if self.lanes[place].replica.next_s == now_s else []

    def _pass(self, place: int, now_s: float) -> list[SampleGroup]:
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

    def _count(self, group: SampleGroup, row: Row) -> bool:
        """Count a row that ended; whether its group is complete by that."""
        if row.sample >= self._greedy:
            group.greedy_left -= 1
        elif group.left:
            group.left -= 1
        else:
            return False
        group.kept.append(row)
        return group.is_complete

    def _stop(self, row: Row, now_s: float) -> list[Row]:
        """Stop a row that nobody waits for; rows of its replica that end at this very moment."""
        place = self.live[row.prompt].homes[row.sample]
        ended = self._advance(place, now_s)
        self.lanes[place].replica.stop(row)
        return ended

    def _advance(self, place: int, now_s: float) -> list[Row]:
        self._changed.add(place)
        self.lanes[place].done_s = now_s
        return self.lanes[place].replica.advance(now_s)


class Round(_Sampling):
    """The rows of a step in step, dealt to replicas as cards are.

    Args:
        replicas: fresh ones.
        prompts: the rows of each prompt that begins.
        wanted: prompts that end the round once they are complete.
        samples: rows that make a prompt complete.
    """

    def __init__(
        self, replicas: Sequence[Replica], prompts: Sequence[Sequence[Row]], *, wanted: int, samples: int
    ) -> None:
        super().__init__(replicas, greedy=1 << 62)
        for rows in prompts:
            group = SampleGroup(prompt=rows[0].prompt, rows=tuple(rows), left=samples, greedy_left=0)
            self.live[group.prompt] = group
        self.seconds = 0.0
        """Until it ended."""
        self.ended_s: dict[int, float] = {}
        """By prompt, until it was complete."""
        self.complete = self._run(wanted)[:wanted]
        """The prompts whose wanted samples are there, in their order; no more than were wanted."""
        kept = {group.prompt for group in self.complete}
        self.aside = [prompt for prompt in self.live if prompt not in kept]
        """Prompts begun that are left for later."""
        self.kept = [row for group in self.complete for row in group.kept]
        """Rows of complete prompts that were waited for."""
        self.stopped = sum(len(group.rows) for group in self.complete) - len(self.kept)
        """How many were not."""

    @property
    def lanes_s(self) -> list[float]:
        """Of each replica, the seconds until its last row had ended."""
        return [self.seconds if lane.replica.rows else lane.done_s for lane in self.lanes]

    def handed_s(self, parts: int) -> list[float]:
        """Of so many parts of the prompts, when each is handed on: when all up to its last are complete."""
        ends = list(accumulate((self.ended_s[prompt] for prompt in sorted(self.ended_s)), max))
        return [ends[max(len(ends) * part // parts, 1) - 1] for part in range(1, parts)] + [self.seconds]

    def _run(self, wanted: int) -> list[SampleGroup]:
        self._deal([row for group in self.live.values() for row in group.rows])
        heap = sorted(self.changes())
        complete: list[SampleGroup] = []
        while heap and len(complete) < wanted:
            self.seconds, place = heapq.heappop(heap)
            ended = self.advance(place, self.seconds)
            self.ended_s.update(dict.fromkeys((group.prompt for group in ended), self.seconds))
            complete += ended
            for change in self.changes():
                heapq.heappush(heap, change)
        return complete

    def _deal(self, rows: Sequence[Row]) -> None:
        hands: list[list[Row]] = [[] for _ in self.lanes]
        for number, row in enumerate(rows):
            place = number * len(hands) // len(rows)
            hands[place].append(row)
            self.live[row.prompt].homes[row.sample] = place
        for place, hand in enumerate(hands):
            self.lanes[place].replica.begin(hand, 0.0)
            self._changed.add(place)


class Stream(_Sampling):
    """Replicas that sample without end.

    Args:
        layout: what is simulated.
        admission: which groups may begin.
        book: where spans are written.
        load_s: seconds for which a replica stands still when it takes new weights.
    """

    def __init__(
        self, layout: Layout, admission: HardBound[SampleGroup], book: Book, *, load_s: float
    ) -> None:
        stage = next(iter(layout.generating))
        super().__init__(layout.replicas(stage), greedy=layout.samples_begun)
        self.newest = 0
        self.begun = 0
        self._layout = layout
        self._engine = layout.problem.hardware.engine
        self._admission = admission
        self._book = book
        self._load_s = load_s
        self._pool = layout.pool_of(stage)
        self._name = layout.problem.graph.stages[stage].name
        self._draws = layout.draws()
        self._next = self._draws.rows(0)
        self._waiting: deque[Row] = deque()
        self._incomplete = 0
        self._empty = set(range(len(self.lanes)))
        steps = layout.plan.freshness + 1
        self._most_groups = math.inf
        if self._engine.holds_prompts:
            self._most_groups = max(layout.plan.freshness, 1) * layout.problem.workload.prompts
        rows = steps * layout.prompts_begun * len(self._next)
        self._fair = max(-(-rows // len(self.lanes)), 1)
        self._open = [(0, place) for place in self._empty]

    def publish(self, version: int, now_s: float, place: int) -> list[SampleGroup]:
        """Take note of new weights, at one replica or (-1) at all; the groups complete at this moment."""
        self.newest = max(self.newest, version)
        complete = []
        if self._layout.interrupts:
            for one in range(len(self.lanes)) if place < 0 else (place,):
                if self.lanes[one].version < version:
                    complete += self._pass(one, now_s)
                    self._load(one, now_s)
        return complete

    def begin(self, now_s: float) -> None:
        """Begin all that may and can begin, and let replicas without rows take the newest weights."""
        while self._begin_one(now_s) or self._refresh(now_s):
            pass
        late = self.newest + self._layout.plan.freshness < self._admission.version
        for place in self._empty:
            self._mark(place, now_s, IdleCause.WEIGHTS if late else IdleCause.FRESHNESS)

    def close(self, end_s: float) -> None:
        """Write down what replicas do at the end."""
        for place in range(len(self.lanes)):
            self._write(place, end_s)

    def _begin_one(self, now_s: float) -> bool:
        """Begin a row, of a group begun before or of a new one; whether one could."""
        if self._waiting:
            row = self._waiting[0]
            least = self.live[row.prompt].version
        else:
            row = self._next[0]
            least = self._admission.least_version(self.newest)
            if least > self.newest or self._incomplete >= self._most_groups:
                return False
        place = self._place(row, least)
        if place is None:
            return False
        lane = self.lanes[place]
        if not self._waiting:
            self._begin_group(lane.version)
        self._waiting.popleft()
        group = self.live[row.prompt]
        group.versions[row.sample], group.homes[row.sample] = lane.version, place
        ended = self._advance(place, now_s)
        assert not ended, "events of this moment are over before rows begin"
        self._mark(place, now_s, None)
        lane.replica.begin([row], now_s)
        self._empty.discard(place)
        heapq.heappush(self._open, (lane.replica.rows, place))
        return True

    def _place(self, row: Row, least: int) -> int | None:
        """The replica with the fewest rows among those with weights, room, and less than their share of rows.

        Another is asked again once it has changed.
        """
        while self._open:
            rows, place = self._open[0]
            lane = self.lanes[place]
            heapq.heappop(self._open)
            if (
                rows == lane.replica.rows < self._fair
                and lane.version >= least
                and lane.replica.has_room(row)
            ):
                return place
        return None

    def _begin_group(self, version: int) -> None:
        rows, samples = tuple(self._next), self._layout.samples_begun
        group = SampleGroup(
            prompt=rows[0].prompt,
            version=version,
            rows=rows,
            left=self._layout.problem.workload.samples,
            greedy_left=len(rows) - samples,
        )
        self.live[group.prompt] = group
        self._admission.begin(group)
        self._waiting.extend(rows)
        self._incomplete += 1
        self.begun += len(rows)
        self._next = self._draws.rows(group.prompt + 1)

    def _refresh(self, now_s: float) -> bool:
        """Let replicas without rows take the newest weights; whether any did."""
        if self._engine.drains and len(self._empty) < len(self.lanes):
            return False
        stale = [place for place in self._empty if self.lanes[place].version < self.newest]
        for place in stale:
            self._advance(place, now_s)
            self._load(place, now_s)
        return bool(stale)

    def _load(self, place: int, now_s: float) -> None:
        """Let the newest weights into a replica, which stands still meanwhile."""
        lane = self.lanes[place]
        lane.version = self.newest
        self._mark(place, now_s, IdleCause.WEIGHTS)
        lane.held_s = now_s + self._load_s
        lane.replica.stall(self._load_s, reads_again=self._engine.rereads)
        if lane.replica.rows:
            self._mark(place, now_s, None)
        self._touch(place)

    def _count(self, group: SampleGroup, row: Row) -> bool:
        complete = super()._count(group, row)
        self._incomplete -= complete
        return complete

    def _stop(self, row: Row, now_s: float) -> list[Row]:
        homes = self.live[row.prompt].homes
        if row.sample not in homes:
            self._waiting.remove(row)
            return []
        ended = super()._stop(row, now_s)
        self._touch(homes[row.sample])
        return ended

    def _advance(self, place: int, now_s: float) -> list[Row]:
        ended = super()._advance(place, now_s)
        self._touch(place)
        return ended

    def _touch(self, place: int) -> None:
        """A replica has changed: it may have room, or no rows left."""
        replica = self.lanes[place].replica
        self._changed.add(place)
        heapq.heappush(self._open, (replica.rows, place))
        if not replica.rows:
            self._empty.add(place)

    def _mark(self, place: int, now_s: float, cause: IdleCause | None) -> None:
        """Write down what a replica did until now, if it does something else from now on, or from when it has
        its weights."""
        lane = self.lanes[place]
        if lane.cause is not cause:
            self._write(place, max(now_s, lane.held_s))
            lane.cause = cause

    def _write(self, place: int, until_s: float) -> None:
        lane = self.lanes[place]
        self._book.write(self._pool, place + 1, lane.cause or self._name, lane.version + 1, until_s)
