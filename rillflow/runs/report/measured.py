"""Measured: the timeline of a run's steps as text, as bars, and as a trace.

RunData ─ steps ─> Measured: works and waits between two times ─┬─ lines of text: who waited where, for whom
                                                               ├─ bars of the report's drawing
                                                               └─ trace events: Perfetto, chrome://tracing
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rillflow.errors import RunDirectoryError
from rillflow.runs.formatting import columns, duration, seconds
from rillflow.runs.report.timeline import MOST_LANES, Bar
from rillflow.runs.report.waits import RankName, RankWork, Wait, rank_times, ranks_of, waits_of, works_of
from rillflow.runs.run_data import RunData

LONGEST = 8
"""Number of waits in the text, longest first."""
TOLD = 3
"""Number of causes named per wait."""
Rows = list[tuple[str, ...]]


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

    @property
    def steps(self) -> str:
        """Steps of the window in words. Example: ``steps 5 to 8``."""
        if self.first == self.last:
            return f"step {self.first:,}"
        return f"steps {self.first:,} to {self.last:,}"


def measured(data: RunData, first: int | None = None, last: int | None = None) -> Measured:
    """Return the measured work and waits of some steps, by default of the run's last phase.

    Raises:
        RunDirectoryError: the run has no span, or a named step has none.
    """
    known = sorted({span.step for span in data.spans})
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
    works = works_of(data.spans)
    inside = [work for work in works if low <= work.step <= high]
    start_s, end_s = min(work.start_s for work in inside), max(work.end_s for work in inside)
    return Measured(
        first=low,
        last=high,
        start_s=start_s,
        end_s=end_s,
        works=[work for work in works if work.start_s < end_s and work.end_s > start_s],
        waits=waits_of(works, start_s, end_s),
        is_inputs=any(span.after for span in data.spans),
    )


def last_steps(data: RunData, count: int) -> Measured:
    """Return the last ``count`` steps of a run, at most back to the start of its last phase."""
    last = max(span.step for span in data.spans)
    begun = data.phases[-1].first if data.phases else 1
    return measured(data, max(min(begun, last), last - count + 1), last)


def measured_lines(found: Measured) -> list[str]:
    """Return lines of text: the time of every rank, and the longest waits."""
    given = "by recorded inputs; a stage without inputs of its step waited for the last work to end"
    how = given if found.is_inputs else "by end times only: this run recorded no inputs of stages"
    long = _longest_rows(found)
    return [
        f"{found.steps}: {duration(found.end_s - found.start_s)}",
        "",
        *columns(rank_rows(found), text=1),
        *_left_out(found),
        *(["", "longest waits, per step and rank", *columns(long, left=2, text=1)] if len(long) > 1 else []),
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
    works = [work for work in found.works if work.on.rank < MOST_LANES]
    waits = [wait for wait in found.waits if wait.cause is not None and wait.on.rank < MOST_LANES]
    worked = [_bar(found, work, work.stage, step=work.step) for work in works]
    waited = [_bar(found, wait, f"waits for {wait.whom}", is_idle=True) for wait in waits]
    return sorted((*worked, *waited), key=lambda bar: (bar.pool, bar.lane, bar.start_s))


def trace_of(found: Measured) -> dict[str, Any]:
    """Return trace events: a pool is a process, a rank a thread; times are microseconds of the run."""
    waits = [wait for wait in found.waits if wait.cause is not None]
    ranks = ranks_of(found.works, waits)
    pools = sorted({on.pool for on in ranks})
    ids = {on: {"pid": pools.index(on.pool) + 1, "tid": place} for place, on in enumerate(ranks, 1)}
    names = [
        {"ph": "M", "name": f"{kind}_name", **ids[on], "args": {"name": name}}
        for on in ranks
        for kind, name in (("process", on.pool), ("thread", f"rank {on.rank}"))
    ]
    works = [
        _event(
            one, ids, "stage", one.stage, step=one.step, rows=one.rows, tokens=one.tokens, after=[*one.after]
        )
        for one in found.works
    ]
    idle = [
        _event(wait, ids, "wait", f"waits for {wait.whom}", step=wait.step, before=wait.before)
        for wait in waits
    ]
    return {"displayTimeUnit": "ms", "traceEvents": [*names, *works, *idle]}


def _event(
    one: RankWork | Wait, ids: Mapping[RankName, Mapping[str, int]], kind: str, name: str, **args: object
) -> dict[str, Any]:
    start, end = round(1e6 * one.start_s), round(1e6 * one.end_s)
    where = {"ph": "X", "name": name, "cat": kind, **ids[one.on]}
    return {**where, "ts": start, "dur": end - start, "args": args}


def _bar(found: Measured, one: RankWork | Wait, stage: str, *, step: int = 0, is_idle: bool = False) -> Bar:
    return Bar(
        pool=one.on.pool,
        lane=f"rank {one.on.rank:>2}",
        stage=stage,
        start_s=max(one.start_s, found.start_s),
        end_s=min(one.end_s, found.end_s),
        step=step,
        is_idle=is_idle,
    )


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
        in_order = sorted(causes.items(), key=lambda entry: -entry[1])[:TOLD]
        told = ", ".join(f"{whom} {seconds(spent)}" for whom, spent in in_order)
        rows.append((stage, pool, seconds(sum(causes.values())), told))
    return rows


def _left_out(found: Measured) -> Iterator[str]:
    """Yield a note for each pool with more ranks than shown."""
    last = {on.pool: on.rank for on in ranks_of(found.works, found.waits)}
    for pool, rank in last.items():
        if rank >= MOST_LANES:
            yield f"  ranks {MOST_LANES} to {rank} of {pool} are only in the trace"
