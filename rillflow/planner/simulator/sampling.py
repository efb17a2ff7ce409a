"""Sampling: replicas and the groups of rows on them, in a round of a step or without end.

prompts ─ rows ─> replicas ─ ended ─> Round: wanted prompts have their wanted samples; the rest is put aside
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
from collections.abc import Iterator, Mapping, Sequence
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

    rows: Sequence[Row]
    """All that begin."""
    version: int = 0
    """The version of the policy under which its first row begins: that of its oldest token."""
    versions: dict[int, int] = field(default_factory=dict)
    """By sample that has begun: under which version."""
    left: int = 0
    """Rows that have not ended."""

    @property
    def prompt(self) -> int:
        """Its prompt's number."""
        return self.rows[0].prompt


@dataclass(frozen=True, kw_only=True)
class Round:
    """The rows of a step in step, dealt to replicas as cards are; it ends with the wanted prompts."""

    complete_s: Mapping[int, float]
    """By prompt that is kept, in their order: until its wanted rows had ended."""
    kept: Sequence[Row]
    """Their wanted rows, the first to end."""
    aside: Sequence[int]
    """Prompts begun that are left for later."""
    lanes_s: Sequence[float]
    """Of each replica, the seconds until its last row had ended, or the round."""
    peak_tokens: float
    """The most tokens a replica's cache held."""

    @property
    def seconds(self) -> float:
        """Until it ended."""
        return max(self.complete_s.values())

    def handed_s(self, parts: int) -> list[float]:
        """Of so many parts of the prompts, when each is handed on: when all up to its last are complete."""
        ends = list(accumulate((self.complete_s[prompt] for prompt in sorted(self.complete_s)), max))
        return [ends[max(len(ends) * part // parts, 1) - 1] for part in range(1, parts)] + [self.seconds]


def played(
    replicas: Sequence[Replica], prompts: Sequence[Sequence[Row]], *, wanted: int, samples: int
) -> Round:
    """A round in which more may begin than is wanted; rows that nobody waits for are stopped.

    Args:
        replicas: fresh ones.
        prompts: the rows of each prompt that begins.
        wanted: prompts that end the round once they are complete.
        samples: rows that make a prompt complete.
    """
    rows, lanes = [row for group in prompts for row in group], len(replicas)
    homes = {(row.prompt, row.sample): number * lanes // len(rows) for number, row in enumerate(rows)}
    for place, replica in enumerate(replicas):
        first, end = (-(-one * len(rows) // lanes) for one in (place, place + 1))
        replica.begin(rows[first:end], 0.0)
    begun = {group[0].prompt: group for group in prompts}
    ended: dict[int, list[Row]] = {prompt: [] for prompt in begun}
    complete_s: dict[int, float] = {}
    done_s, heap = [0.0] * lanes, sorted((replica.next_s, place) for place, replica in enumerate(replicas))
    while heap and heap[0][0] < math.inf and len(complete_s) < wanted:
        now_s, place = heapq.heappop(heap)
        if replicas[place].next_s != now_s:
            continue
        changed, left = {place}, replicas[place].advance(now_s)
        while left:
            row = left.pop()
            own = ended[row.prompt]
            own += [row] if len(own) < samples else []
            if len(own) < samples or row.prompt in complete_s:
                continue
            complete_s[row.prompt] = now_s
            for other in [other for other in begun[row.prompt] if other not in own]:
                home = homes[other.prompt, other.sample]
                left += replicas[home].advance(now_s)
                replicas[home].stop(other)
                changed.add(home)
        for place in changed:
            done_s[place] = now_s
            heapq.heappush(heap, (replicas[place].next_s, place))
    complete_s = dict([*complete_s.items()][:wanted])
    seconds = max(complete_s.values())
    return Round(
        complete_s=complete_s,
        kept=[row for prompt in complete_s for row in ended[prompt]],
        aside=[prompt for prompt in begun if prompt not in complete_s],
        lanes_s=[seconds if replica.rows else done for replica, done in zip(replicas, done_s, strict=True)],
        peak_tokens=max(replica.peak_tokens for replica in replicas),
    )


@dataclass(kw_only=True, slots=True)
class _Lane:
    """A replica, and why it does nothing; without a cause it works."""

    replica: Replica
    version: int = 0
    held_s: float = 0.0
    cause: IdleCause | None = IdleCause.FRESHNESS


class Stream:
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
        self.lanes = [_Lane(replica=replica) for replica in layout.replicas(stage)]
        self.live: dict[int, SampleGroup] = {}
        self.newest = 0
        self.begun = 0
        self._layout = layout
        self._engine = layout.problem.hardware.engine
        self._admission = admission
        self._book = book
        self._load_s = load_s
        self._pool = layout.pool_of(stage)
        self._name = layout.problem.graph.stages[stage].name
        self._next = layout.rows(0)
        self._waiting: deque[Row] = deque()
        self._incomplete = 0
        self._empty = set(range(len(self.lanes)))
        ahead, prompts = layout.plan.freshness, layout.problem.workload.prompts
        self._most_groups = max(ahead, 1) * prompts if self._engine.holds_prompts else math.inf
        rows = (ahead + 1) * prompts * len(self._next)
        self._fair = max(-(-rows // len(self.lanes)), 1)
        self._open = [(0, place) for place in self._empty]
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

    def advance(self, now_s: float, place: int) -> list[SampleGroup]:
        """Let a replica come to its next event, unless it changed since; the groups complete by that."""
        return self._pass(place, now_s) if self.lanes[place].replica.next_s == now_s else []

    def publish(self, now_s: float, version: int, place: int) -> list[SampleGroup]:
        """Take note of new weights, at one replica or (-1) at all; the groups complete at this moment."""
        self.newest = max(self.newest, version)
        complete = []
        if self._engine.interrupts:
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
        self.live[row.prompt].versions[row.sample] = lane.version
        ended = self._pass(place, now_s)
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
            may_take = rows == lane.replica.rows < self._fair and lane.version >= least
            if may_take and lane.replica.has_room(row):
                return place
        return None

    def _begin_group(self, version: int) -> None:
        rows = self._next
        group = SampleGroup(rows=rows, version=version, left=len(rows))
        self.live[group.prompt] = group
        self._admission.begin(group)
        self._waiting.extend(rows)
        self._incomplete += 1
        self.begun += len(rows)
        self._next = self._layout.rows(group.prompt + 1)

    def _refresh(self, now_s: float) -> bool:
        """Let replicas without rows take the newest weights; whether any did."""
        if self._engine.drains and len(self._empty) < len(self.lanes):
            return False
        stale = [place for place in self._empty if self.lanes[place].version < self.newest]
        for place in stale:
            self._pass(place, now_s)
            self._load(place, now_s)
        return bool(stale)

    def _load(self, place: int, now_s: float) -> None:
        """Let the newest weights into a replica, which stands still meanwhile."""
        lane = self.lanes[place]
        lane.version = self.newest
        self._mark(place, now_s, IdleCause.WEIGHTS)
        lane.held_s = now_s + self._load_s
        lane.replica.stall(self._load_s)
        if lane.replica.rows:
            self._mark(place, now_s, None)
        self._touch(place)

    def _pass(self, place: int, now_s: float) -> list[SampleGroup]:
        """Let time pass on a replica; the groups complete by that."""
        complete = []
        for row in self.lanes[place].replica.advance(now_s):
            group = self.live[row.prompt]
            group.left -= 1
            complete += [] if group.left else [group]
        self._incomplete -= len(complete)
        self._touch(place)
        return complete

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
