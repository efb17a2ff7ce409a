"""Waits: the work of every rank of a run, its waits, and the cause of each wait.

spans, rank by rank ─> RankWork ─┬─ gaps without work, traced back ─> Wait: an interval and its cause
                                 └─ between two times ─> RankTime: busy, waiting by cause, other

A rank waits until its next work begins. The cause is the input of that work (``after`` of its span) that
ended last. Before the cause began, the rank waited for the cause's own last input, and so on, back to the
start of the wait. A work without inputs from its step, such as the first stage or arriving weights, waited
for the work that ended last on any rank. Time between the end of a cause and the start of the next work
belongs to no stage: calls, results in transfer, records, evaluations, checkpoints.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from rillflow.runs.reader import RankSpan, SpanRecord

ROUNDING_S = 2e-6
"""Times have microsecond precision; a start plus a duration may exceed the matching end by this much."""
END = "the end"
"""``Wait.before`` of a rank that has finished while other ranks still work."""
UNKNOWN = "ranks"
"""Pool name for spans of older versions, which recorded no pool."""


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


def works_of(spans: Sequence[SpanRecord]) -> list[RankWork]:
    """Return the work of every rank, in the order of the spans."""
    return [
        RankWork(
            on=RankName(span.pool or UNKNOWN, each.rank),
            stage=span.stage,
            step=span.step,
            start_s=each.start_s,
            end_s=each.start_s + each.duration_s,
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
    for on, own in sorted(order.by_rank.items()):
        end = RankWork(on=on, stage=END, step=0, start_s=last_s, end_s=last_s, rows=0, tokens=0, after=())
        reached_s = low_s
        for work in (*own, end):
            if work.start_s > reached_s and reached_s < high_s:
                found += [
                    Wait(
                        on=on,
                        start_s=start_s,
                        end_s=min(end_s, high_s),
                        before=work.stage,
                        step=work.step,
                        cause=cause,
                    )
                    for start_s, end_s, cause in order.walked_back(work, reached_s)
                    if min(end_s, high_s) > start_s
                ]
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
    busy: dict[RankName, float] = dict.fromkeys(ranks_of(works, waits), 0.0)
    reached: dict[RankName, float] = dict.fromkeys(busy, low_s)
    for work in sorted(works, key=attrgetter("start_s")):
        start_s, end_s = max(work.start_s, reached[work.on]), min(work.end_s, high_s)
        busy[work.on] += max(0.0, end_s - start_s)
        reached[work.on] = max(reached[work.on], end_s)
    waited: dict[RankName, dict[str, float]] = {on: defaultdict(float) for on in busy}
    for wait in waits:
        if wait.cause is not None:
            waited[wait.on][wait.whom] += wait.end_s - wait.start_s
    return [
        RankTime(
            on=on,
            busy_s=busy_s,
            waited_s=dict(sorted(waited[on].items(), key=lambda entry: -entry[1])),
            else_s=max(0.0, high_s - low_s - busy_s - sum(waited[on].values())),
        )
        for on, busy_s in busy.items()
    ]


def ranks_of(works: Sequence[RankWork], waits: Sequence[Wait]) -> list[RankName]:
    """Return the sorted ranks that worked or waited."""
    return sorted({work.on for work in works} | {wait.on for wait in waits})


class _Order:
    """Works sorted by end time: over all ranks, by rank, and by stage of a step."""

    def __init__(self, works: Sequence[RankWork]) -> None:
        in_order = sorted(works, key=attrgetter("end_s"))
        self.by_rank: dict[RankName, list[RankWork]] = defaultdict(list)
        by_stage: dict[tuple[int, str], list[RankWork]] = defaultdict(list)
        for work in in_order:
            self.by_rank[work.on].append(work)
            by_stage[work.step, work.stage].append(work)
        self._all, self._by_stage = _Ended(in_order), {key: _Ended(own) for key, own in by_stage.items()}
        self._own = {on: _Ended(own) for on, own in self.by_rank.items()}
        for own in self.by_rank.values():
            own.sort(key=attrgetter("start_s"))

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
        given = [
            self._by_stage[work.step, name] for name in work.after if (work.step, name) in self._by_stage
        ]
        looked_at = [*given, self._own[work.on]] if given else [self._all]
        found = [last for each in looked_at if (last := each.last(until_s, work)) is not None]
        return max(found, key=attrgetter("end_s"), default=None)


class _Ended:
    """Works sorted by end time."""

    def __init__(self, works: list[RankWork]) -> None:
        self._works, self._ends = list(works), [work.end_s for work in works]

    def last(self, until_s: float, work: RankWork) -> RankWork | None:
        """Return the last work that ended by ``until_s`` and began before ``work``."""
        place = bisect_right(self._ends, until_s + ROUNDING_S)
        while place and self._works[place - 1].start_s >= work.start_s:
            place -= 1
        return self._works[place - 1] if place else None


def _whole(span: SpanRecord) -> RankSpan:
    """Return a stage without recorded ranks as the work of a single rank."""
    times = {"start_s": span.start_s, "duration_s": span.duration_s}
    return RankSpan(rank=0, rows=span.rows, tokens=span.tokens, **times)
