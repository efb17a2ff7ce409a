"""Waits: what every rank of a run did, where it waited, and for whom.

spans, rank by rank ─> RankWork ─┬─ where a rank did none, walked back ─> Wait: a piece of time, its cause
                                 └─ between two times ─> RankTime: busy, waited for whom, else

A rank waits until it begins its next work. Of all that this work was given (``after`` of its span), what
ended last was waited for; before that began, what it waited for itself; and so on, back to where the wait
began. What was given nothing of its step (its first stage, weights that arrive) waited for whatever ended
last on any rank. Time between the end of one and the beginning of the next belongs to no stage: calls,
results on their way, records, evaluations, checkpoints.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from rillflow.observe.reader import RankSpan, SpanRecord

ROUNDING_S = 2e-6
"""Times are written to the microsecond: an end, a start and a duration added, may lie so much too late."""
END = "the end"
"""What a rank waits for that has nothing left to do, while others have."""
UNKNOWN = "ranks"
"""The pool of what an older version wrote without one."""


class RankName(NamedTuple):
    """One rank of a run."""

    pool: str
    """Its pool."""
    rank: int
    """Within the pool."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RankWork:
    """What one rank did at a stretch: its part of a stage."""

    on: RankName
    """Which rank; where none was written, the pool's first stands for all."""
    stage: str
    """The stage's name."""
    step: int
    """The step it belongs to."""
    start_s: float
    """When it began, in seconds of the run."""
    end_s: float
    """When it ended."""
    rows: int
    """Rows of its result, 0 when unknown."""
    tokens: int
    """Tokens of its result, 0 when unknown."""
    after: tuple[str, ...]
    """The stages of the step whose results it was given."""


@dataclass(frozen=True, kw_only=True)
class Wait:
    """A piece of the time in which a rank did nothing."""

    on: RankName
    """The rank."""
    start_s: float
    """When it began, in seconds of the run."""
    end_s: float
    """When it ended."""
    before: str
    """The stage that the rank began when it had waited long enough; END where it began none."""
    step: int
    """That stage's step; 0 at the end."""
    cause: RankWork | None
    """What was being done meanwhile that it waited for; None where that was no stage."""

    @property
    def whom(self) -> str:
        """The cause in words. Example: ``policy.update on main``; empty where it was no stage."""
        return "" if self.cause is None else f"{self.cause.stage} on {self.cause.on.pool}"


@dataclass(frozen=True, kw_only=True)
class RankTime:
    """What a rank did in a window; the three kinds of seconds make up all of it."""

    on: RankName
    """The rank."""
    busy_s: float
    """Seconds it worked."""
    waited_s: Mapping[str, float]
    """Seconds it waited, by cause in words, the longest first."""
    else_s: float
    """Seconds in which it did no stage, nor waited for one."""


def works_of(spans: Sequence[SpanRecord]) -> list[RankWork]:
    """What every rank did, in order of the spans."""
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
    """The time of every rank without work between two times, in pieces.

    Args:
        works: all of a run: what ended a wait, or began it, may lie outside.
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
    """What every rank did between two times, by pool and rank.

    Args:
        works: what was done, there or elsewhere.
        waits: those between the two times.
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
    """The ranks that did something, or waited, in order."""
    return sorted({work.on for work in works} | {wait.on for wait in waits})


class _Order:
    """Works by the time they ended: of all ranks, of each rank, of each stage of a step."""

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
        """From the beginning of a work back to a time, pieces: from, to, and what it waited for meanwhile."""
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
        """What ended last before a work began, of what it was given and what its own rank did."""
        given = [
            self._by_stage[work.step, name] for name in work.after if (work.step, name) in self._by_stage
        ]
        looked_at = [*given, self._own[work.on]] if given else [self._all]
        found = [last for each in looked_at if (last := each.last(until_s, work)) is not None]
        return max(found, key=attrgetter("end_s"), default=None)


class _Ended:
    """Some works in the order in which they ended."""

    def __init__(self, works: list[RankWork]) -> None:
        self._works, self._ends = list(works), [work.end_s for work in works]

    def last(self, until_s: float, work: RankWork) -> RankWork | None:
        """The last that had ended by a time, and had begun before another work."""
        place = bisect_right(self._ends, until_s + ROUNDING_S)
        while place and self._works[place - 1].start_s >= work.start_s:
            place -= 1
        return self._works[place - 1] if place else None


def _whole(span: SpanRecord) -> RankSpan:
    """A stage of which nobody wrote what each rank did, as if one had done all."""
    times = {"start_s": span.start_s, "duration_s": span.duration_s}
    return RankSpan(rank=0, rows=span.rows, tokens=span.tokens, **times)
