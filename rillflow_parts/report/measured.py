"""Measured: the work of every rank of a run, its waits, and the cause of each wait.

spans, rank by rank ─> RankWork ─┬─ gaps without work, traced back ─> Wait: an interval and its cause
                                 └─ between two times ─> RankTime: busy, waiting by cause, other

RunData ─ steps ─> Measured: works and waits between two times ─┬─ lines of text: who waited where, for whom
                                                               ├─ bars of the report's drawing
                                                               └─ trace events: Perfetto, chrome://tracing

A rank waits until its next work begins. The cause is the input of that work (``after`` of its span) that
ended last. Before the cause began, the rank waited for the cause's own last input, and so on, back to the
start of the wait. A work without inputs from its step, such as the first stage or arriving weights, waited
for the work that ended last on any rank. Time between the end of a cause and the start of the next work
belongs to no stage: calls, results in transfer, records, evaluations, checkpoints.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

from rillflow.errors import RunDirectoryError
from rillflow.runs.formatting import columns, duration, seconds
from rillflow.runs.passes import PassesRecord
from rillflow.runs.reader import RankSpan, SpanRecord
from rillflow.runs.run_data import RunData
from rillflow.runs.span_columns import SpanColumns
from rillflow_parts.report.pass_bars import pass_events, pass_lines
from rillflow_parts.report.timeline import MOST_LANES, Bar

LONGEST = 8
"""Number of waits in the text, longest first."""
TOLD = 3
"""Number of causes named per wait."""
ROUNDING_S = 2e-6
"""Times have microsecond precision; a start plus a duration may exceed the matching end by this much."""
END = "the end"
"""``Wait.before`` of a rank that has finished while other ranks still work."""
UNKNOWN = "ranks"
"""Pool name for spans of older versions, which recorded no pool."""
Rows = list[tuple[str, ...]]
_ENDED = attrgetter("end_s")


class RankName(NamedTuple):
    """One rank of a run."""

    pool: str
    """Name of the pool."""
    rank: int
    """Index within the pool."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RankWork:
    """Contribution of one rank to a stage, as one interval."""

    on: RankName
    """The rank; for spans without ranks, rank 0 stands for the whole pool."""
    stage: str
    """Name of the stage."""
    step: int
    """Step of the work."""
    start_s: float
    """Start, in seconds of the run."""
    end_s: float
    """End, in seconds of the run."""
    rows: int
    """Rows of the result; 0 when unknown."""
    tokens: int
    """Tokens of the result; 0 when unknown."""
    after: tuple[str, ...]
    """Stages of the same step whose results were its inputs."""


@dataclass(frozen=True, kw_only=True)
class Wait:
    """Interval in which a rank did no work."""

    on: RankName
    """The rank."""
    start_s: float
    """Start, in seconds of the run."""
    end_s: float
    """End, in seconds of the run."""
    before: str
    """Stage that the rank began after the wait; END if it began none."""
    step: int
    """Step of that stage; 0 at the end."""
    cause: RankWork | None
    """Work that the rank waited for during this interval; None if it waited for no stage."""

    @property
    def whom(self) -> str:
        """Cause in words. Example: ``policy.update on main``; empty without a stage as cause."""
        return "" if self.cause is None else f"{self.cause.stage} on {self.cause.on.pool}"


@dataclass(frozen=True, kw_only=True)
class RankTime:
    """Time of a rank within a window; the three kinds of seconds sum to the window."""

    on: RankName
    """The rank."""
    busy_s: float
    """Seconds of work."""
    waited_s: Mapping[str, float]
    """Seconds of waiting by cause, longest first."""
    else_s: float
    """Seconds outside work and attributed waits."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Work and waits of all ranks from the start of one step to the end of another."""

    first: int
    """First step of the window."""
    last: int
    """Last step of the window."""
    start_s: float
    """Start of the first work of these steps, in seconds of the run."""
    end_s: float
    """End of their last work, in seconds of the run."""
    works: Sequence[RankWork]
    """Works that overlap the window."""
    waits: Sequence[Wait]
    """Waits, clipped to the window."""
    is_inputs: bool
    """Whether the run recorded the inputs of its stages."""
    passes: Sequence[PassesRecord] = ()
    """Recorded passes of the steps' pipelines."""

    @property
    def activities(self) -> list[RankWork | Wait]:
        """Works, and the waits with a cause."""
        return [*self.works, *(wait for wait in self.waits if wait.cause is not None)]

    @property
    def steps(self) -> str:
        """Steps of the window in words. Example: ``steps 5 to 8``."""
        if self.first == self.last:
            return f"step {self.first:,}"
        return f"steps {self.first:,} to {self.last:,}"


def works_of(spans: Sequence[SpanRecord]) -> list[RankWork]:
    """Return the work of every rank, in the order of the spans."""
    return [
        RankWork(
            on=RankName(span.pool or UNKNOWN, each.rank),
            stage=span.stage,
            step=span.step,
            start_s=each.start_s,
            end_s=each.end_s,
            rows=each.rows,
            tokens=each.tokens,
            after=span.after,
        )
        for span in spans
        for each in span.ranks or [_whole(span)]
    ]


def waits_of(works: Sequence[RankWork], low_s: float, high_s: float) -> list[Wait]:
    """Return the intervals between two times in which ranks did no work.

    Args:
        works: all works of the run; a work before or after the window can end or begin a wait.
        low_s, high_s: the two times.
    """
    order, found = _Order(works), list[Wait]()
    last_s = max((work.end_s for work in works), default=0.0)
    for on, by_end in sorted(order.by_rank.items()):
        end = RankWork(on=on, stage=END, step=0, start_s=last_s, end_s=last_s, rows=0, tokens=0, after=())
        reached_s = low_s
        for work in (*sorted(by_end, key=attrgetter("start_s")), end):
            if work.start_s > reached_s and reached_s < high_s:
                next_work: dict[str, Any] = {"on": on, "before": work.stage, "step": work.step}
                for start_s, end_s, cause in order.walked_back(work, reached_s):
                    if min(end_s, high_s) > start_s:
                        found.append(
                            Wait(**next_work, start_s=start_s, end_s=min(end_s, high_s), cause=cause)
                        )
            reached_s = max(reached_s, work.end_s)
    return found


def rank_times(
    works: Sequence[RankWork], waits: Sequence[Wait], low_s: float, high_s: float
) -> list[RankTime]:
    """Return the time of every rank between two times, by pool and rank.

    Args:
        works: works of the run, inside or outside the window.
        waits: waits between the two times.
        low_s, high_s: the two times.
    """
    own: dict[RankName, list[RankWork]] = defaultdict(list)
    waited: dict[RankName, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for work in works:
        own[work.on].append(work)
    for wait in waits:
        if wait.cause is not None:
            waited[wait.on][wait.whom] += wait.end_s - wait.start_s
    found = []
    for on in ranks_of(works, waits):
        busy_s, causes = covered(own[on], low_s, high_s), waited[on]
        else_s = max(0.0, high_s - low_s - busy_s - sum(causes.values()))
        found.append(RankTime(on=on, busy_s=busy_s, waited_s=longest_first(causes), else_s=else_s))
    return found


def covered(works: Iterable[RankWork | SpanRecord], low_s: float, high_s: float) -> float:
    """Return the seconds between two times during which at least one of the works ran."""
    total, reached_s = 0.0, low_s
    for work in sorted(works, key=attrgetter("start_s")):
        stop_s = min(work.end_s, high_s)
        total += max(0.0, stop_s - max(work.start_s, reached_s))
        reached_s = max(reached_s, stop_s)
    return total


def longest_first(spent: Mapping[str, float]) -> dict[str, float]:
    """Return seconds by name, the longest first."""
    return dict(sorted(spent.items(), key=lambda entry: -entry[1]))


def ranks_of(works: Sequence[RankWork], waits: Sequence[Wait]) -> list[RankName]:
    """Return the sorted ranks that worked or waited."""
    return sorted({work.on for work in works} | {wait.on for wait in waits})


def measured(data: RunData, first: int | None = None, last: int | None = None) -> Measured:
    """Return the measured work and waits of some steps, by default of the run's last phase.

    Raises:
        RunDirectoryError: the run has no span, or a named step has none.
    """
    known = data.stages.steps.tolist()
    if not known:
        raise RunDirectoryError(
            f"{data.path} has no spans, so no stage has a time",
            why="spans are written when a step ends, and no step has ended",
            fix="try again after the first step",
        )
    begun = data.phases[-1].first if data.phases else known[0]
    low = first if first is not None else min(begun, known[-1])
    high = last if last is not None else known[-1]
    for step in (low, high):
        if step not in known:
            raise RunDirectoryError(
                f"{data.path} has no span of step {step}",
                why=f"the run has spans of steps {known[0]} to {known[-1]}",
                fix=f"name steps in this range, such as --steps {max(known[0], known[-1] - 3)}-{known[-1]}",
            )
    passes = [record for record in data.passes if low <= record.step <= high]
    return measured_of(data.stages, low, high, passes)


def measured_of(stages: SpanColumns, low: int, high: int, passes: Sequence[PassesRecord] = ()) -> Measured:
    """Return the measured work and waits from one step with spans to another."""
    works = works_of(stages.around(low, high))
    inside = [work for work in works if low <= work.step <= high]
    start_s, end_s = min(work.start_s for work in inside), max(work.end_s for work in inside)
    return Measured(
        first=low,
        last=high,
        start_s=start_s,
        end_s=end_s,
        works=[work for work in works if work.start_s < end_s and work.end_s > start_s],
        waits=waits_of(works, start_s, end_s),
        is_inputs=stages.has_inputs,
        passes=passes,
    )


def last_steps(data: RunData, count: int) -> Measured:
    """Return the last ``count`` steps of a run, at most back to the start of its last phase."""
    last = int(data.stages.steps[-1])
    begun = data.phases[-1].first if data.phases else 1
    return measured(data, max(min(begun, last), last - count + 1), last)


def measured_lines(found: Measured) -> list[str]:
    """Return lines of text: the time of every rank, and the longest waits."""
    passes = pass_lines(found.passes)
    given = "by recorded inputs; a stage without inputs of its step waited for the last work to end"
    how = given if found.is_inputs else "by end times only: this run recorded no inputs of stages"
    long = _longest_rows(found)
    return [
        f"{found.steps}: {duration(found.end_s - found.start_s)}",
        "",
        *columns(rank_rows(found), text=1),
        *_left_out(found),
        *(["", "longest waits, per step and rank", *columns(long, left=2, text=1)] if len(long) > 1 else []),
        *(["", *passes] if passes else []),
        "",
        f"causes: {how}",
        "other: calls, results in transfer, records, evaluations, checkpoints",
    ]


def rank_rows(found: Measured) -> Rows:
    """Return a row for every shown rank: the shares of its time, and the stages it waited for."""
    rows: Rows = [("rank", "busy", "waits", "other", "waits for")]
    whole = found.end_s - found.start_s or 1.0
    for one in rank_times(found.works, found.waits, found.start_s, found.end_s):
        if one.on.rank < MOST_LANES:
            waited = sum(one.waited_s.values())
            shares = (f"{spent / whole:.0%}" for spent in (one.busy_s, waited, one.else_s))
            causes = [f"{whom} {spent / whole:.0%}" for whom, spent in one.waited_s.items()]
            rows.append((f"{one.on.pool} {one.on.rank}", *shares, ", ".join(causes[:TOLD])))
    return rows


def measured_bars(found: Measured) -> list[Bar]:
    """Return bars for every shown rank, including a bar for each wait that names its cause."""
    bars = [
        Bar(
            pool=one.on.pool,
            lane=f"rank {one.on.rank:>2}",
            stage=_name(one),
            start_s=max(one.start_s, found.start_s),
            end_s=min(one.end_s, found.end_s),
            step=one.step if isinstance(one, RankWork) else 0,
            is_idle=isinstance(one, Wait),
        )
        for one in found.activities
        if one.on.rank < MOST_LANES
    ]
    return sorted(bars, key=lambda bar: (bar.pool, bar.lane, bar.start_s))


def trace_of(found: Measured) -> dict[str, Any]:
    """Return trace events: a pool is a process, a rank a thread; times are microseconds of the run."""
    ranks = sorted({one.on for one in found.activities})
    pools = sorted({on.pool for on in ranks})
    ids = {on: {"pid": pools.index(on.pool) + 1, "tid": place} for place, on in enumerate(ranks, 1)}
    names = [
        {"ph": "M", "name": f"{kind}_name", **ids[on], "args": {"name": name}}
        for on in ranks
        for kind, name in (("process", on.pool), ("thread", f"rank {on.rank}"))
    ]
    events = [_event(one, ids) for one in found.activities]
    lanes = sorted({RankName(record.pool, rank.rank) for record in found.passes for rank in record.ranks})
    below = {on: {"pid": ids[on]["pid"], "tid": len(ranks) + place} for place, on in enumerate(lanes, 1)}
    more = {on: {"name": f"rank {on.rank} passes"} for on in lanes}
    names += [{"ph": "M", "name": "thread_name", **below[on], "args": more[on]} for on in lanes]
    return {"displayTimeUnit": "ms", "traceEvents": [*names, *events, *pass_events(found.passes, below)]}


def _event(one: RankWork | Wait, ids: Mapping[RankName, Mapping[str, int]]) -> dict[str, Any]:
    start, end = round(1e6 * one.start_s), round(1e6 * one.end_s)
    kind, args = "wait", dict[str, Any](step=one.step)
    if isinstance(one, RankWork):
        kind, args = "stage", {**args, "rows": one.rows, "tokens": one.tokens, "after": [*one.after]}
    else:
        args["before"] = one.before
    head = {"ph": "X", "name": _name(one), "cat": kind, **ids[one.on]}
    return {**head, "ts": start, "dur": end - start, "args": args}


def _name(one: RankWork | Wait) -> str:
    return one.stage if isinstance(one, RankWork) else f"waits for {one.whom}"


def _longest_rows(found: Measured) -> Rows:
    """Return waits by following stage and pool: seconds per step and rank, and the stages waited for."""
    ranks = Counter(on.pool for on in ranks_of(found.works, found.waits))
    waited: dict[tuple[str, str], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for wait in found.waits:
        if wait.cause is not None:
            count = ranks[wait.on.pool] * (found.last - found.first + 1)
            waited[wait.before, wait.on.pool][wait.whom] += (wait.end_s - wait.start_s) / count
    rows: Rows = [("before", "on", "waits", "for")]
    for (stage, pool), causes in sorted(waited.items(), key=lambda entry: -sum(entry[1].values()))[:LONGEST]:
        told = [f"{whom} {seconds(spent)}" for whom, spent in longest_first(causes).items()]
        rows.append((stage, pool, seconds(sum(causes.values())), ", ".join(told[:TOLD])))
    return rows


def _left_out(found: Measured) -> Iterator[str]:
    """Yield a note for each pool with more ranks than shown."""
    last = {on.pool: on.rank for on in ranks_of(found.works, found.waits)}
    for pool, rank in last.items():
        if rank >= MOST_LANES:
            yield f"  ranks {MOST_LANES} to {rank} of {pool} are only in the trace"


class _Order:
    """Works sorted by end time: over all ranks, by rank, and by stage of a step."""

    def __init__(self, works: Sequence[RankWork]) -> None:
        self._all = sorted(works, key=_ENDED)
        self.by_rank: dict[RankName, list[RankWork]] = defaultdict(list)
        self._by_stage: dict[tuple[int, str], list[RankWork]] = defaultdict(list)
        for work in self._all:
            self.by_rank[work.on].append(work)
            self._by_stage[work.step, work.stage].append(work)

    def walked_back(self, work: RankWork, since_s: float) -> Iterator[tuple[float, float, RankWork | None]]:
        """Yield intervals from the start of a work back to ``since_s``: start, end, and the work waited
        for.
        """
        until_s = work.start_s
        while until_s > since_s:
            cause = self._ended_last(work, until_s)
            if cause is None or cause.end_s <= since_s:
                yield since_s, until_s, None
                return
            reached_s, begun_s = min(cause.end_s, until_s), max(cause.start_s, since_s)
            yield reached_s, until_s, None
            yield begun_s, reached_s, cause
            work, until_s = cause, begun_s

    def _ended_last(self, work: RankWork, until_s: float) -> RankWork | None:
        """Return the work that ended last among inputs and own works; without inputs, among all works."""
        stages = [(work.step, name) for name in work.after if (work.step, name) in self._by_stage]
        among = [*(self._by_stage[stage] for stage in stages), self.by_rank[work.on]]
        lasts = [_last_before(work, until_s, each) for each in (among if stages else [self._all])]
        return max((last for last in lasts if last is not None), key=_ENDED, default=None)


def _last_before(work: RankWork, until_s: float, in_order: Sequence[RankWork]) -> RankWork | None:
    """Return the last of some works in order of end that ended by ``until_s`` and began before ``work``."""
    place = bisect_right(in_order, until_s + ROUNDING_S, key=_ENDED)
    while place and in_order[place - 1].start_s >= work.start_s:
        place -= 1
    return in_order[place - 1] if place else None


def _whole(span: SpanRecord) -> RankSpan:
    """Return a stage without recorded ranks as the work of a single rank."""
    times = {"start_s": span.start_s, "duration_s": span.duration_s}
    return RankSpan(rank=0, rows=span.rows, tokens=span.tokens, **times)
