"""Result: what a simulation found out, as records, and the book in which its timeline is written.

work, idleness ─ Book ─> spans of a pool's lanes ─┬─> seconds by cause: with the work, all of the time
ages of rows ─────────────────────────────────────┴─> Simulation ─> tables, JSON, the timeline of a report
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate
from statistics import fmean, linear_regression, median

from rillflow.planner.schedule import BESIDE

WHOLE = 0
"""The lane of work that all devices of a pool do together; replicas have the lanes from 1."""


class IdleCause(StrEnum):
    """Why a pool, or one of its replicas, does nothing."""

    DATA = "waits for data"
    """The next stage's rows have not arrived."""
    TAIL = "tail of generation"
    """Other replicas of the pool still generate, this one has no rows left."""
    WEIGHTS = "waits for weights"
    """The weights to generate with are not there, or just arrive."""
    FRESHNESS = "freshness bound"
    """A row begun now might be too old when it is trained."""
    NOTHING = "nothing to do"
    """The pool has done its part of the step, others have not."""
    OVERHEAD = "between steps"
    """Seconds of a step that belong to no stage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedSpan:
    """One bar of the timeline: work, or idleness with its cause."""

    pool: str
    """The devices it holds; empty for what runs beside them."""
    lane: int
    """The replica, where the pool generates; 0 else."""
    stage: str
    """The stage's name; of idleness empty."""
    step: int
    """The step it belongs to, from 1."""
    start_s: float
    """When it began, from the beginning of the simulation."""
    end_s: float
    """When it ended."""
    cause: IdleCause | None = None
    """Why nothing was done; none where something was."""


@dataclass(frozen=True, kw_only=True)
class PoolTime:
    """What a pool did with its time; of a pool with replicas, the mean over them."""

    pool: str
    """Its name."""
    busy_s: float
    """Seconds it worked."""
    idle_s: Mapping[IdleCause, float]
    """Seconds it did not, by cause; with ``busy_s`` they make up the whole time."""
    peak_bytes: float
    """The most its fullest device held."""

    @property
    def idle_share(self) -> float:
        """The share of its time in which it did nothing."""
        idle = sum(self.idle_s.values())
        return idle / (self.busy_s + idle) if self.busy_s + idle else 0.0


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """Some steps of a plan, event by event."""

    step_s: tuple[float, ...]
    """Seconds of each step, from the end of the one before to its own."""
    rows_per_step: int
    """Rows that a step trains on."""
    tokens: tuple[int, ...]
    """Of each step, tokens of the rows it trained on, prompts and responses."""
    generation_s: tuple[float, ...]
    """Of each step in step, seconds of its generation; empty where rows flow."""
    pools: tuple[PoolTime, ...]
    """In the order of the plan's."""
    ages: Mapping[int, int]
    """Trained rows by age: the policy's version that trained on a row less that of its oldest token."""
    begun: int
    """Rows that were begun, greedy ones among them."""
    trained: int
    """Of those, the ones that a step consumed."""
    dropped: Mapping[str, int]
    """Of those, the ones that no step will consume, by reason."""
    unfinished: int
    """Of those, the ones on their way when the last step ended."""
    spans: tuple[SimulatedSpan, ...]
    """The timeline, by pool, lane and time."""

    @property
    def wall_s(self) -> float:
        """Seconds of all steps."""
        return sum(self.step_s)

    @property
    def median_step_s(self) -> float:
        """The median step."""
        return median(self.step_s)

    @property
    def mean_step_s(self) -> float:
        """The mean step."""
        return fmean(self.step_s)

    @property
    def settled_step_s(self) -> float:
        """What a long run comes to once rows flow: the slope of steps' ends, the first quarter left out.

        Ahead steps end in bursts: the mean of few depends on where in a burst the first and last of them lie.
        """
        ends = [*accumulate(self.step_s, initial=0.0)][len(self.step_s) // 4 :]
        return linear_regression(range(len(ends)), ends).slope

    @property
    def rows_per_s(self) -> float:
        """Trained rows a second, once settled."""
        return self.rows_per_step / self.settled_step_s if self.settled_step_s else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens of trained rows a second, once settled."""
        late = fmean(self.tokens[len(self.tokens) // 4 :])
        return late / self.settled_step_s if self.settled_step_s else 0.0


class Book:
    """Writes the timeline down: a lane works or has one cause not to, from moment to moment."""

    def __init__(self) -> None:
        self._spans: list[SimulatedSpan] = []
        self._until: dict[tuple[str, int], float] = defaultdict(float)

    def write(self, pool: str, lane: int, what: str, step: int, end_s: float) -> None:
        """Since the lane was written of last a stage was computed, or nothing for a cause."""
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
        """The lane has nothing of its own to be written of until then."""
        self._until[pool, lane] = until_s

    def close(self, end_s: float) -> tuple[SimulatedSpan, ...]:
        """The spans in order, those beyond the end cut there."""
        begun = [span for span in self._spans if span.start_s < end_s]
        cut = [span if span.end_s <= end_s else replace(span, end_s=end_s) for span in begun]
        return tuple(sorted(cut, key=lambda span: (span.pool, span.lane, span.start_s, span.end_s)))


def pool_times(
    spans: Sequence[SimulatedSpan], lanes: Mapping[str, int], peaks: Mapping[str, float]
) -> tuple[PoolTime, ...]:
    """What each pool did; of its replicas, of which it has as many as ``lanes`` says, the mean."""
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
