"""Result: what a simulation found out, as records.

spans of pools, ages of rows ─> Simulation ─┬─> tables, JSON
                                            └─> the timeline that a real run's spans are drawn on
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean, median


class Cause(StrEnum):
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
    duration_s: float
    """How long it took."""
    cause: Cause | None = None
    """Why nothing was done; none where something was."""
    rows: int = 0
    """Rows it worked on; 0 where they are not counted by bar."""
    tokens: int = 0
    """Their tokens."""

    @property
    def end_s(self) -> float:
        """When it ended."""
        return self.start_s + self.duration_s


@dataclass(frozen=True, kw_only=True)
class PoolTime:
    """What a pool did with its time; of a pool with replicas, the mean over them."""

    pool: str
    """Its name."""
    busy_s: float
    """Seconds it worked."""
    idle_s: Mapping[Cause, float]
    """Seconds it did not, by cause; with ``busy_s`` they make up the whole time."""
    peak_bytes: float
    """The most its fullest device held."""

    @property
    def idle_share(self) -> float:
        """The share of the time in which it did nothing."""
        idle = sum(self.idle_s.values())
        return idle / (idle + self.busy_s) if idle + self.busy_s else 0.0


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """Steps of a plan, simulated.

    Example:
        simulate(problem, costs, plan, steps=20, seed=0).median_step_s
    """

    step_s: tuple[float, ...]
    """Seconds of each step: from the end of the one before to its own."""
    rows_per_step: int
    """Rows that each step trains on."""
    tokens: tuple[int, ...]
    """Tokens of those rows, prompts and responses, by step."""
    generation_s: tuple[float, ...]
    """Of each step in step: seconds of its generation; empty where rows flow."""
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
        """The mean step of the later half: what a long run comes to once rows flow."""
        return fmean(self.step_s[len(self.step_s) // 2 :])

    @property
    def rows_per_s(self) -> float:
        """Trained rows a second, of the later half of the steps."""
        return self.rows_per_step / self.settled_step_s if self.settled_step_s else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens of trained rows a second, of the later half of the steps."""
        late = len(self.step_s) // 2
        seconds = sum(self.step_s[late:])
        return sum(self.tokens[late:]) / seconds if seconds else 0.0

    @property
    def oldest(self) -> int:
        """The greatest age of a trained row, in versions."""
        return max(self.ages, default=0)
