"""Ranking: what makes one plan better than another, and what a search found: the best, and what others lack.

step seconds, devices, price ─> value, the less the better ─> cut, so that equal plans are equal ─> Ranking
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from rillflow.errors import PlanError
from rillflow.planner.evaluate import StepEvaluation
from rillflow.planner.plan import Plan

Floats = np.ndarray
"""Numbers of float64, one for each of the plans compared."""
_KEPT_BITS = np.int64(~((1 << 20) - 1))
HOUR_S = 3600.0


class Goal(StrEnum):
    """What is to be least."""

    STEP = "step"
    """Seconds of a step."""
    DEVICE_HOURS = "device-hours"
    """Device-hours of a step: most samples per device-hour."""
    DEVICES = "devices"
    """Devices, where a step keeps the deadline."""
    COST = "cost"
    """What a step costs at the fleets' prices."""


@dataclass(frozen=True, kw_only=True)
class Objective:
    """A goal, and what it needs.

    Example:
        Objective(goal=Goal.DEVICES, deadline_s=300)
    """

    goal: Goal = Goal.STEP
    """What is to be least."""
    deadline_s: float = math.inf
    """Seconds a step may take at most; no plan that takes longer counts."""

    def __post_init__(self) -> None:
        if not self.deadline_s > 0:
            raise PlanError(
                f"the deadline is {self.deadline_s} seconds",
                why="a step takes time",
                fix="give the most seconds a step may take",
            )
        if self.goal is Goal.DEVICES and math.isinf(self.deadline_s):
            raise PlanError(
                "the least devices are asked for, and no deadline is given",
                why="the fewest devices that fit would take any time",
                fix="give the most seconds a step may take",
            )

    def values(self, step_s: Floats, devices: Floats, price_per_hour: Floats) -> Floats:
        """The value of plans, the less the better; infinite beyond the deadline.

        Never falls with any of the three, so the value of lower bounds is a lower bound. Cut to 32 binary
        digits: sums that differ by rounding only are the same.
        """
        step = np.asarray(step_s, dtype=np.float64)
        within = np.isfinite(step) & (rounded(step) <= self.deadline_s)
        step = np.where(within, step, 0.0)
        match self.goal:
            case Goal.STEP:
                found = step
            case Goal.DEVICE_HOURS:
                found = step * devices / HOUR_S
            case Goal.DEVICES:
                found = devices + 0.0 * step
            case Goal.COST:
                found = step * price_per_hour / HOUR_S
        return rounded(np.where(within, found, np.inf))


def rounded(numbers: Floats) -> Floats:
    """Numbers of 0 and more cut to 32 binary digits; the order of what differs by more is kept."""
    whole = np.ascontiguousarray(numbers, dtype=np.float64)
    return (whole.view(np.int64) & _KEPT_BITS).view(np.float64)


class Cause(StrEnum):
    """What a placement is behind by."""

    TRANSFER = "transfer"
    """Rows or weights on their way between its pools."""
    IDLE = "idle"
    """Devices that wait for other pools."""
    SLOWER = "slower stages"
    """Stages that take longer on what they are given."""
    TURNS = "turns"
    """Stages one after another that the best plan runs side by side."""
    DEVICES = "devices"
    """More devices, or dearer ones, than what they gain is worth."""
    SIMULATED = "simulated"
    """Steps that take longer when they are simulated, though formulas say less."""
    TIE = "tie"
    """Nothing: it is as good, and only the order of equal plans puts it behind."""


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """One placement at its best."""

    plan: Plan
    """What to launch."""
    evaluation: StepEvaluation
    """What it costs."""
    value: float
    """The objective's; the less the better."""
    cause: Cause | None = None
    """What it is behind the best by; none of the best itself."""
    why: str = ""
    """The same in words and numbers."""


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """The result of a search."""

    best: tuple[Ranked, ...]
    """The best plan found of each of the best placements, best first."""
    placements: int
    """Set partitions times freshness bounds that were looked at."""
    nowhere: int
    """Of those looked at one by one, the ones that fit on no allocation."""
