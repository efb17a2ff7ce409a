"""Ranking: what makes one plan better than another, and what a search found: the best, and what others lack.

step seconds, devices, price ─> value, the less the better ─> cut, so that equal plans are equal ─> Ranking

a ranked plan ─┬─ as good ────────────────────────────────────────────────> tie
               ├─ as fast, on more devices ───────────────────────────────> devices
               ├─ half of what is lost is on the way between pools ───────> transfer
               ├─ its devices wait for 5 points more of the step ─────────> idle
               ├─ its stages take longer, by half of it ──────────────────> slower stages
               ├─ they do not, but wait for each other ───────────────────> turns
               └─ it is faster by formulas, and not when simulated ───────> simulated
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from rillflow.errors import PlanError
from rillflow.planner.evaluate import StepEvaluation
from rillflow.planner.plan import Plan

Floats = np.ndarray
"""Numbers of float64, one for each of the plans compared."""
_KEPT_BITS = np.int64(~((1 << 20) - 1))
HOUR_S = 3600.0
LITTLE = 0.10
"""A gain that is not worth doubling a cluster."""


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
        is_open = math.isinf(self.deadline_s)
        if (is_open and self.goal is Goal.DEVICES) or not self.deadline_s > 0:
            told = "no deadline" if is_open else f"a deadline of {self.deadline_s} seconds"
            raise PlanError(
                f"the least {self.goal} is asked for with {told}",
                why="a step takes time, and the fewest devices that fit would take any",
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
        found = {
            Goal.STEP: step,
            Goal.DEVICE_HOURS: step * devices / HOUR_S,
            Goal.DEVICES: devices + 0.0 * step,
            Goal.COST: step * price_per_hour / HOUR_S,
        }
        return rounded(np.where(within, found[self.goal], np.inf))


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
    sizes: tuple[ClusterSize, ...] = ()
    """The best plan on other sizes of the cluster, ascending."""


@dataclass(frozen=True, kw_only=True)
class ClusterSize:
    """The best plan on one size of a cluster."""

    devices: int
    """That there are."""
    best: Ranked | None
    """Its best plan; none where none fits."""
    rows_per_s: float
    """What it trains on in a second; 0 where nothing fits."""
    gain: float | None
    """Rows a second over those of the size before, less 1; none of the first that fits anything."""

    @property
    def gains_little(self) -> bool:
        """Whether it brings less than ``LITTLE`` over the size before."""
        return self.gain is not None and self.gain < LITTLE


def explained(found: Ranked, winner: Ranked) -> Ranked:
    """The best plan of a placement, with why it is no better than the best of all."""
    mine, best = found.evaluation, winner.evaluation
    late, moved = mine.step_s - best.step_s, sum(mine.transfers_s) + mine.crossing_s
    more = {index: spent - best.seconds[index] for index, spent in mine.seconds.items()}
    if late <= 1e-9 * best.step_s:
        if (found.value, mine.devices) == (winner.value, best.devices):
            why = "as good; of equal plans fewer pools, fresher tokens, the first names win"
            return replace(found, cause=Cause.TIE, why=why)
        why = f"{mine.step_s:.4g} s on {mine.devices} devices; the best takes {best.step_s:.4g} s on"
        return replace(found, cause=Cause.DEVICES, why=f"{why} {best.devices}")
    if moved >= late / 2:
        cause, why = Cause.TRANSFER, f"{moved:.3g} s on the way between pools"
    elif mine.idle_share - best.idle_share >= 0.05:
        pools = zip(found.plan.pools, mine.pools, strict=True)
        pool, use = max(pools, key=lambda one: one[0].devices * one[1].idle_share)
        why = f"the {pool.devices} devices of pool {pool.name} idle {use.idle_share:.0%} of a step"
        cause = Cause.IDLE
    elif sum(max(0.0, one) for one in more.values()) >= late / 2:
        slow = max(mine.timings, key=lambda timing: more[timing.stage])
        spent, less = mine.seconds[slow.stage], best.seconds[slow.stage]
        cause, why = Cause.SLOWER, f"{slow.name} takes {spent:.3g} s, in the best plan {less:.3g} s"
    else:
        work, least = sum(mine.seconds.values()), sum(best.seconds.values())
        why = f"its stages take {work:.3g} s in sum, in the best plan {least:.3g} s side by side"
        cause = Cause.TURNS
    return replace(found, cause=cause, why=f"{mine.step_s:.4g} s, {late:.3g} s more: {why}")


def order_as_shown(ranking: Ranking, shown_s: Sequence[float]) -> tuple[Ranking, list[int]]:
    """The ranking with its first plans in the order of what a step of each is shown to take.

    Args:
        ranking: by formulas.
        shown_s: seconds of a step of the first plans: in step as computed, ahead as simulated.

    Returns:
        The ranking, and where in the old one its first plans were.
    """
    order = sorted(range(len(shown_s)), key=lambda place: (shown_s[place], place))
    best = [*(ranking.best[place] for place in order), *ranking.best[len(order) :]]
    first = replace(best[0], cause=None, why="")
    behind = [explained(one, first) for one in best[1:]]
    for place, shown in enumerate(sorted(shown_s)[1:]):
        if behind[place].evaluation.step_s < first.evaluation.step_s:
            why = f"{shown:.4g} s a step when simulated"
            behind[place] = replace(behind[place], cause=Cause.SIMULATED, why=why)
    return replace(ranking, best=(first, *behind)), order
