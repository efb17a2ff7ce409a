"""Ranking: the order of plans, and the result of a search: the best plans and the weakness of the others.

step seconds, devices, price ─> value, lower is better ─> rounded, so that equal plans are equal ─> Ranking
a ranked plan ─┬─ equally good ───────────────────────────────────────────> tie
               ├─ as fast, on more devices ───────────────────────────────> devices
               ├─ transfers between pools take at least half of the loss ─> transfer
               ├─ its devices are idle for 5 points more of the step ─────> idle
               ├─ its stages take longer, by at least half of the loss ───> slower stages
               ├─ its stages only wait for each other ────────────────────> one after the other
               └─ it is computed as faster, but not simulated as faster ──> simulated
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from rillflow.errors import PlanError
from rillflow.placement.plan import Plan
from rillflow.runs.formatting import seconds
from rillflow_parts.fusion.alignment import fused_of
from rillflow_planner.cost_model.costs import CostModel
from rillflow_planner.evaluate import StepEvaluation, evaluate, stages_by_name
from rillflow_planner.problem import Problem

Floats = np.ndarray
"""Float64 array with one number per compared plan."""
_KEPT_BITS = np.int64(~((1 << 20) - 1))
HOUR_S = 3600.0
LITTLE = 0.10
"""Smallest relative gain that makes a larger cluster worthwhile."""

PAYS = 0.03
"""Least relative gain for which the planner fuses updates or gathers rows."""


class Goal(StrEnum):
    """Minimised quantity."""

    STEP = "step"
    """Seconds of a step."""
    DEVICE_HOURS = "device-hours"
    """Device-hours of a step, for most samples per device-hour."""
    DEVICES = "devices"
    """Number of devices, among plans that meet the deadline."""
    COST = "cost"
    """Price of a step, in the currency of the machines' prices."""


@dataclass(frozen=True, kw_only=True)
class SearchObjective:
    """A goal and its parameters.

    Example:
        SearchObjective(goal=Goal.DEVICES, deadline_s=300)
    """

    goal: Goal = Goal.STEP
    """Quantity to minimise."""
    deadline_s: float = math.inf
    """Largest allowed seconds of a step; slower plans are excluded."""

    def __post_init__(self) -> None:
        is_open = math.isinf(self.deadline_s)
        if (is_open and self.goal is Goal.DEVICES) or not self.deadline_s > 0:
            told = "no deadline" if is_open else f"a deadline of {self.deadline_s} seconds"
            raise PlanError(
                f"the objective {self.goal} has {told}",
                why="a deadline must be above 0 seconds, and the objective devices needs one",
                fix="set the deadline to the largest allowed seconds of a step",
            )

    def values(self, step_s: Floats, devices: Floats, price_per_hour: Floats) -> Floats:
        """Return the value of plans, lower is better; infinite beyond the deadline.

        The value never falls when an argument grows, so lower bounds of the arguments give a lower bound of
        the value. It is truncated to 32 binary digits, so sums that differ only by rounding are equal.
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
    """Truncate non-negative numbers to 32 binary digits; larger differences keep their order."""
    whole = np.ascontiguousarray(numbers, dtype=np.float64)
    return (whole.view(np.int64) & _KEPT_BITS).view(np.float64)


class Cause(StrEnum):
    """Main weakness of a placement relative to the best plan."""

    TRANSFER = "transfer"
    """Transfers of rows or weights between its pools."""
    IDLE = "idle"
    """Devices idle because they wait for other pools."""
    SLOWER = "slower stages"
    """Stages that take longer on their devices."""
    TURNS = "one after the other"
    """Stages that run one after the other, and in parallel in the best plan."""
    DEVICES = "devices"
    """More devices, or more expensive ones, than their gain is worth."""
    SIMULATED = "simulated"
    """Slower steps in the simulation than in the best plan, though computed as faster."""
    TIE = "tie"
    """No weakness: it is equally good, and only the tie-break order makes it second."""


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """Best plan of one placement."""

    problem: Problem
    """The step that it is a plan of, with its sampler, freshness bound and recomputation."""
    plan: Plan
    """Plan to launch."""
    evaluation: StepEvaluation
    """Cost of the plan."""
    value: float
    """Value of the objective; lower is better."""
    cause: Cause | None = None
    """Main weakness relative to the best plan; None for the best plan."""
    why: str = ""
    """The weakness in words and numbers."""


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """Result of a search."""

    best: tuple[Ranked, ...]
    """Best plan found for each of the best placements, best first."""
    placements: int
    """Number of placements considered: set partitions times freshness bounds."""
    nowhere: int
    """Number of individually searched placements that fit on no allocation."""
    sizes: tuple[ClusterSize, ...] = ()
    """Best plan for other cluster sizes, ascending; without fusion."""
    fusion: Fusion | None = None
    """The best fused plan beside the best plan without fusion; None if a step has no two updates to fuse."""


@dataclass(frozen=True, kw_only=True)
class Fusion:
    """The best plan with two updates as one fused stage, beside the best plan without."""

    best: Ranked | None
    """Best fused plan; None if no fused plan fits."""
    plain: Ranked
    """Best plan without fusion."""
    is_bound: bool = False
    """Whether the fused plan has no schedule, because its lower bound is too long already."""
    why: str = ""
    """Why fusion does not pay; empty if it pays."""

    @property
    def value(self) -> float:
        """Value of the best fused plan, or its bound."""
        return self.best.value if self.best else math.inf

    @property
    def gain(self) -> float:
        """Value without fusion over the value with it, minus 1; at most that, for a bound."""
        return self.plain.value / self.value - 1


@dataclass(frozen=True, kw_only=True)
class ClusterSize:
    """Best plan for one cluster size."""

    devices: int
    """Number of devices in the cluster."""
    best: Ranked | None
    """Best plan; None if no plan fits."""
    rows_per_s: float
    """Trained rows per second; 0 if no plan fits."""
    gain: float | None
    """Relative gain in rows per second over the previous size; None without a fitting previous size."""

    @property
    def gains_little(self) -> bool:
        """Whether the gain over the previous size is less than ``LITTLE``."""
        return self.gain is not None and self.gain < LITTLE


def rank(problem: Problem, costs: CostModel, plan: Plan, objective: SearchObjective) -> Ranked:
    """Return a plan with its predicted seconds, its cost and its value; see ``evaluate`` for errors."""
    found = evaluate(problem, costs, plan)
    stages_s = stages_by_name(problem, found)
    planned = replace(plan, predicted_step_s=found.step_s, predicted_stages_s=stages_s)
    price = sum(
        pool.devices * problem.hardware.fleet(pool.machine_type).price_per_hour for pool in plan.pools
    )
    numbers = (np.array([one]) for one in (found.step_s, found.devices, price))
    value = float(objective.values(*numbers)[0])
    return Ranked(problem=problem, plan=planned, evaluation=found, value=value)


def explained(found: Ranked, winner: Ranked) -> Ranked:
    """Return the best plan of a placement with the reason why it is not the best of all."""
    mine, best = found.evaluation, winner.evaluation
    late, moved = mine.step_s - best.step_s, sum(mine.transfers_s) + mine.crossing_s
    more = {index: spent - best.seconds[index] for index, spent in mine.seconds.items()}
    pool, use = max(
        zip(found.plan.pools, mine.pools, strict=True), key=lambda one: one[0].devices * one[1].idle_share
    )
    slow = max(mine.timings, key=lambda timing: more[timing.stage])
    if late <= 1e-9 * best.step_s and (found.value, mine.devices) == (winner.value, best.devices):
        why = "equally good; ties go to fewer device groups, then fresher tokens, then names in order"
        return replace(found, cause=Cause.TIE, why=why)
    if late <= 1e-9 * best.step_s:
        why = f"as fast, on {mine.devices} devices instead of {best.devices}"
        return replace(found, cause=Cause.DEVICES, why=why)
    if moved >= late / 2:
        cause, why = Cause.TRANSFER, f"{seconds(moved)} for transfers between device groups"
    elif mine.idle_share - best.idle_share >= 0.05:
        cause, why = Cause.IDLE, f"group {pool.name} is idle {use.idle_share:.0%} of a step"
    elif sum(max(0.0, one) for one in more.values()) >= late / 2:
        took = f"{seconds(mine.seconds[slow.stage])} instead of {seconds(best.seconds[slow.stage])}"
        cause, why = Cause.SLOWER, f"{slow.name} takes {took}"
    else:
        cause, why = Cause.TURNS, "its stages take turns; device groups of the best plan work in parallel"
    return replace(found, cause=cause, why=f"{late / best.step_s:+.0%}: {why}")


def order_as_shown(ranking: Ranking, shown_s: Sequence[float]) -> tuple[Ranking, list[int]]:
    """Return the ranking with its first plans ordered by their displayed seconds.

    Args:
        ranking: order by computed steps.
        shown_s: displayed seconds of a step of the first plans: computed, or simulated with freshness.

    Returns:
        The ranking, and the old positions of its first plans.
    """
    order = sorted(range(len(shown_s)), key=lambda place: (shown_s[place], place))
    best = [*(ranking.best[place] for place in order), *ranking.best[len(order) :]]
    first = replace(best[0], cause=None, why="")
    others = [explained(one, first) for one in best[1:]]
    for place, shown in enumerate(sorted(shown_s)[1:]):
        if others[place].evaluation.step_s < first.evaluation.step_s:
            why = f"{seconds(shown)} a step when simulated"
            others[place] = replace(others[place], cause=Cause.SIMULATED, why=why)
    fusion = ranking.fusion
    if fusion and not fusion.why and not fused_of(first.plan):
        fusion = replace(fusion, why="its simulated step is longer")
    return replace(ranking, best=(first, *others), fusion=fusion), order
