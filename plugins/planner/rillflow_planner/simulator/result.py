"""Result: records of a simulation, and the book that writes its timeline.

work, idle time ─ Book ─> spans of a pool's lanes ─┬─> seconds by cause; with the work, the whole time
ages of rows ──────────────────────────────────────┴─> Simulation ─> tables, JSON, the timeline of a report
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate
from statistics import fmean, linear_regression, median

from rillflow_planner.evaluate import BESIDE

WHOLE = 0
"""Lane of work that all devices of a pool do together; replicas have lanes from 1."""


class IdleCause(StrEnum):
    """Reason why a pool, or one of its replicas, is idle."""

    DATA = "waits for data"
    """The next stage's rows have not arrived."""
    TAIL = "tail of generation"
    """Other replicas of the pool still generate; this one has no rows left."""
    WEIGHTS = "waits for weights"
    """The weights to generate with are missing, or are being received."""
    FRESHNESS = "freshness bound"
    """A row that begins now might be too old when it is trained."""
    NOTHING = "nothing to do"
    """The pool has finished its part of the step; others have not."""
    OVERHEAD = "between steps"
    """Seconds of a step outside stages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedSpan:
    """One bar of the timeline: work, or idle time with its cause."""

    pool: str
    """Pool of the work; empty for stages without devices."""
    lane: int
    """Replica, if the pool generates; otherwise 0."""
    stage: str
    """Name of the stage; empty for idle time."""
    step: int
    """Step, from 1."""
    start_s: float
    """Start, in seconds of the simulation."""
    end_s: float
    """End, in seconds of the simulation."""
    cause: IdleCause | None = None
    """Cause of idle time; None for work."""


@dataclass(frozen=True, kw_only=True)
class PoolTime:
    """Time of a pool; for a pool with replicas, the mean over them."""

    pool: str
    """Name of the pool."""
    busy_s: float
    """Seconds of work."""
    idle_s: Mapping[IdleCause, float]
    """Idle seconds by cause; together with ``busy_s`` they cover the whole time."""
    peak_bytes: float
    """Largest memory use of its fullest device."""

    @property
    def idle_share(self) -> float:
        """Share of its time in which the pool was idle."""
        idle = sum(self.idle_s.values())
        return idle / (self.busy_s + idle) if self.busy_s + idle else 0.0


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """Simulated steps of a plan."""

    step_s: tuple[float, ...]
    """Seconds of each step, from the end of the previous step to its own."""
    rows_per_step: int
    """Number of rows that a step trains on."""
    tokens: tuple[int, ...]
    """Tokens of each step's trained rows, prompts and responses."""
    generation_s: tuple[float, ...]
    """Generation seconds of each step; empty when rows flow."""
    pools: tuple[PoolTime, ...]
    """Time of the pools, in the plan's order."""
    ages: Mapping[int, int]
    """Trained rows by age: the policy version that trained the row minus that of its oldest token."""
    begun: int
    """Number of rows begun, including greedy ones."""
    trained: int
    """Number of begun rows that a step consumed."""
    dropped: Mapping[str, int]
    """Number of begun rows that no step will consume, by reason."""
    unfinished: int
    """Number of begun rows still in progress when the last step ended."""
    spans: tuple[SimulatedSpan, ...]
    """Timeline, by pool, lane and time."""

    @property
    def median_step_s(self) -> float:
        """Median seconds of a step."""
        return median(self.step_s)

    @property
    def mean_step_s(self) -> float:
        """Mean seconds of a step."""
        return fmean(self.step_s)

    @property
    def settled_step_s(self) -> float:
        """Seconds of a step in a long run: the slope of the steps' end times without the first quarter.

        With freshness above 0, steps end in bursts. A mean over few steps would depend on the position of the
        first and the last step within a burst.
        """
        ends = [*accumulate(self.step_s, initial=0.0)][len(self.step_s) // 4 :]
        return linear_regression(range(len(ends)), ends).slope

    @property
    def rows_per_s(self) -> float:
        """Trained rows per second, once settled."""
        return self.rows_per_step / self.settled_step_s if self.settled_step_s else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens of trained rows per second, once settled."""
        late = fmean(self.tokens[len(self.tokens) // 4 :])
        return late / self.settled_step_s if self.settled_step_s else 0.0


class Book:
    """Writes the timeline: at every moment a lane works or has one cause for being idle."""

    def __init__(self) -> None:
        self._spans: list[SimulatedSpan] = []
        self._until: dict[tuple[str, int], float] = defaultdict(float)

    def write(self, pool: str, lane: int, what: str, step: int, end_s: float) -> None:
        """Record a stage or an idle cause from the lane's last entry to ``end_s``."""
        start_s = self._until[pool, lane]
        if end_s > start_s:
            cause = what if isinstance(what, IdleCause) else None
            span = SimulatedSpan(
                pool=pool,
                lane=lane,
                stage="" if cause else what,
                step=step,
                start_s=start_s,
                end_s=end_s,
                cause=cause,
            )
            self._spans.append(span)
            self._until[pool, lane] = end_s

    def pass_over(self, pool: str, lane: int, until_s: float) -> None:
        """Skip the lane's time until ``until_s`` without an entry."""
        self._until[pool, lane] = until_s

    def close(self, end_s: float) -> tuple[SimulatedSpan, ...]:
        """Return the spans in order, cut at ``end_s``."""
        begun = [span for span in self._spans if span.start_s < end_s]
        cut = [span if span.end_s <= end_s else replace(span, end_s=end_s) for span in begun]
        return tuple(sorted(cut, key=lambda span: (span.pool, span.lane, span.start_s, span.end_s)))


def pool_times(
    spans: Sequence[SimulatedSpan], lanes: Mapping[str, int], peaks: Mapping[str, float]
) -> tuple[PoolTime, ...]:
    """Return the time of each pool, averaged over its replicas, whose number is in ``lanes``."""
    busy: dict[str, float] = defaultdict(float)
    idle: dict[str, dict[IdleCause, float]] = {pool: defaultdict(float) for pool in peaks}
    for span in spans:
        if span.pool == BESIDE:
            continue
        seconds = (span.end_s - span.start_s) / (1 if span.lane == WHOLE else lanes[span.pool])
        if span.cause is None:
            busy[span.pool] += seconds
        else:
            idle[span.pool][span.cause] += seconds
    return tuple(
        PoolTime(pool=pool, busy_s=busy[pool], idle_s=dict(idle[pool]), peak_bytes=peak)
        for pool, peak in peaks.items()
    )
