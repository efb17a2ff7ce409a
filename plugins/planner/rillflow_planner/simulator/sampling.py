"""Sampling: replicas and their groups of rows, in the round of a step or as an endless stream.

prompts ─ rows ─> replicas ─ ended ─> Round: wanted prompts have their wanted samples; the rest is put aside
new weights ─┬─ interrupts ──> Stream: every replica takes them at once and continues its rows with them
             └─ otherwise ───> a replica takes them when it has no rows, or when no replica has any
                               (``drains``); until then it gets no rows that need newer weights

consumes        prompts, of a round or endless; versions of the weights
waits for       a slot and room in a cache; the admission
unblocked by    a row that ends, a batch that is formed, weights that arrive
produces        complete groups, spans of the replicas with the cause of idle time

Rounds that begin more than is wanted: tail batching of RollPacker (arXiv 2509.21009). A row put aside has
the same length when it begins again.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from rillflow.controller.admission import CapacityBound, StalenessBound
from rillflow_planner.simulator.draws import Row
from rillflow_planner.simulator.layout import Layout
from rillflow_planner.simulator.replica import Replica
from rillflow_planner.simulator.result import Book, IdleCause


@dataclass(kw_only=True, slots=True, eq=False)
class SampleGroup:
    """Rows of one prompt in progress."""

    rows: Sequence[Row]
    """All its rows."""
    version: int = 0
    """Policy version of its first row, and thus of its oldest token."""
    versions: dict[int, int] = field(default_factory=dict)
    """Policy version at the start of each row, by sample."""
    left: int = 0
    """Number of rows that have not ended."""

    @property
    def prompt(self) -> int:
        """Number of its prompt."""
        return self.rows[0].prompt


@dataclass(frozen=True, kw_only=True)
class Round:
    """Rows of one step in contiguous blocks by replica; it ends when the wanted prompts are complete."""

    complete_s: Mapping[int, float]
    """Seconds until the wanted rows of each kept prompt had ended, in order of completion."""
    kept: Sequence[Row]
    """Wanted rows of the kept prompts: for each prompt, the first to end."""
    aside: Sequence[int]
    """Begun prompts that are left for later."""
    lanes_s: Sequence[float]
    """Seconds until each replica's last row, or the round, had ended."""
    peak_tokens: float
    """Largest number of tokens in a replica's cache."""

    @property
    def seconds(self) -> float:
        """Seconds until the round ended."""
        return max(self.complete_s.values())

    def handed_s(self, parts: int) -> list[float]:
        """Return when each of ``parts`` parts of the prompts moves on: when all prompts so far are
        complete.
        """
        ends = list(accumulate((self.complete_s[prompt] for prompt in sorted(self.complete_s)), max))
        return [ends[max(len(ends) * part // parts, 1) - 1] for part in range(1, parts)] + [self.seconds]


def played(
    replicas: Sequence[Replica], prompts: Sequence[Sequence[Row]], *, wanted: int, samples: int
) -> Round:
    """Run a round that may begin more than is wanted; rows that are no longer needed are stopped.

    Args:
        replicas: unused replicas.
        prompts: rows of each prompt that begins.
        wanted: number of complete prompts that ends the round.
        samples: number of rows that completes a prompt.
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


class CountBound(CapacityBound[SampleGroup]):
    """Admission rule of verl and AReaL: counts the groups begun and not trained, whatever their age.

    Under version v, (v + k + 1) steps' groups may have begun in all. k is verl's ``staleness_threshold`` and
    AReaL's ``max_head_offpolicyness`` (arXiv 2505.24298, equation 3).
    """

    def __init__(self, *, freshness: float, prompts: int, published: int) -> None:
        super().__init__(freshness=math.ceil(freshness), prompts=prompts, published=published)
        self._ahead = round((freshness + 1) * prompts * published)

    def least_version(self, newest: int) -> int:
        """Return ``newest`` while fewer groups than allowed have begun, otherwise ``newest`` + 1."""
        most = self._ahead + int(newest * self._published * self._prompts)
        return newest + (self._alive + self.batch * self._prompts >= most)

    def overdue(self, groups: Iterable[SampleGroup]) -> list[SampleGroup]:  # noqa: ARG002
        """Return no group: none becomes too old."""
        return []


@dataclass(kw_only=True, slots=True)
class _Lane:
    """A replica with its idle cause; None while it works."""

    replica: Replica
    version: int = 0
    held_s: float = 0.0
    cause: IdleCause | None = IdleCause.FRESHNESS


class Stream:
    """Replicas that sample endlessly.

    Args:
        layout: the simulated plan.
        admission: rule for the groups that may begin.
        book: recorder of spans.
    """

    def __init__(self, layout: Layout, admission: StalenessBound[SampleGroup], book: Book) -> None:
        stage = next(iter(layout.generating))
        self.lanes = [_Lane(replica=replica) for replica in layout.replicas(stage)]
        self.live: dict[int, SampleGroup] = {}
        self.newest = 0
        self.begun = 0
        self._layout = layout
        self._engine = layout.problem.hardware.engine
        self._admission = admission
        self._book = book
        self._load_s = layout.evaluation.crossing_s
        self._pool = layout.pool_of(stage)
        self._name = layout.problem.graph.stages[stage].name
        self._next = layout.rows(0)
        self._waiting: deque[Row] = deque()
        self._incomplete = 0
        self._empty = set(range(len(self.lanes)))
        ahead, prompts = layout.plan.freshness, layout.problem.workload.prompts
        self._most_groups = max(ahead, 1) * prompts if self._engine.holds_prompts else math.inf
        rows = (ahead + 1) * prompts * len(self._next)
        self._fair = max(math.ceil(rows / len(self.lanes)), 1)
        self._open = [(0, place) for place in self._empty]
        self._changed: set[int] = set()

    @property
    def peak_tokens(self) -> float:
        """Largest number of tokens in a replica's cache."""
        return max(lane.replica.peak_tokens for lane in self.lanes)

    def changes(self) -> Iterator[tuple[float, int]]:
        """Yield time and place of the next event of each replica that changed since the last call."""
        for place in sorted(self._changed):
            if self.lanes[place].replica.next_s < math.inf:
                yield self.lanes[place].replica.next_s, place
        self._changed.clear()

    def advance(self, now_s: float, place: int) -> list[SampleGroup]:
        """Advance a replica to its next event, unless it changed since, and return the groups completed."""
        return self._pass(place, now_s) if self.lanes[place].replica.next_s == now_s else []

    def publish(self, now_s: float, version: int) -> list[SampleGroup]:
        """Record new weights, and return the groups completed at this moment."""
        self.newest = version
        complete = []
        for place in range(len(self.lanes)) if self._engine.interrupts else ():
            complete += self._pass(place, now_s)
            self._load(place, now_s)
        return complete

    def begin(self, now_s: float) -> None:
        """Begin all rows that are allowed and fit, and update idle replicas to the newest weights."""
        while self._begin_one(now_s) or self._refresh(now_s):
            pass
        late = self.newest + self._layout.plan.freshness < self._admission.version
        for place in self._empty:
            self._mark(place, now_s, IdleCause.WEIGHTS if late else IdleCause.FRESHNESS)

    def close(self, end_s: float) -> None:
        """Record the activity of the replicas at the end."""
        for place in range(len(self.lanes)):
            self._write(place, end_s)

    def _begin_one(self, now_s: float) -> bool:
        """Begin a row of a started or a new group, and return whether that was possible."""
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
        """Return the least loaded replica with recent enough weights, room, and less than its share of rows.

        A rejected replica is considered again once it has changed.
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
        """Update replicas without rows to the newest weights, and return whether any was updated."""
        if self._engine.drains and len(self._empty) < len(self.lanes):
            return False
        stale = [place for place in self._empty if self.lanes[place].version < self.newest]
        for place in stale:
            self._pass(place, now_s)
            self._load(place, now_s)
        return bool(stale)

    def _load(self, place: int, now_s: float) -> None:
        """Load the newest weights into a replica, which pauses meanwhile."""
        lane = self.lanes[place]
        lane.version = self.newest
        self._mark(place, now_s, IdleCause.WEIGHTS)
        lane.held_s = now_s + self._load_s
        lane.replica.stall(self._load_s)
        if lane.replica.rows:
            self._mark(place, now_s, None)
        self._touch(place)

    def _pass(self, place: int, now_s: float) -> list[SampleGroup]:
        """Advance a replica, and return the groups completed."""
        complete = []
        for row in self.lanes[place].replica.advance(now_s):
            group = self.live[row.prompt]
            group.left -= 1
            complete += [] if group.left else [group]
        self._incomplete -= len(complete)
        self._touch(place)
        return complete

    def _touch(self, place: int) -> None:
        """Record that a replica has changed: it may have room, or no rows left."""
        replica = self.lanes[place].replica
        self._changed.add(place)
        heapq.heappush(self._open, (replica.rows, place))
        if not replica.rows:
            self._empty.add(place)

    def _mark(self, place: int, now_s: float, cause: IdleCause | None) -> None:
        """Record a replica's activity until now, or until it has its weights, if the activity changes."""
        lane = self.lanes[place]
        if lane.cause is not cause:
            self._write(place, max(now_s, lane.held_s))
            lane.cause = cause

    def _write(self, place: int, until_s: float) -> None:
        lane = self.lanes[place]
        self._book.write(self._pool, place + 1, lane.cause or self._name, lane.version + 1, until_s)
