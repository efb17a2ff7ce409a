"""Doubling: what more machines of the same kinds would bring, and where they no longer pay.

cluster x 1, x 2, x 4 ─ search each ─> best step ─> gain over the one before ─ under 10% ─> warning
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from rillflow.errors import PlanError
from rillflow.planner.hardware import Hardware
from rillflow.planner.mapping.ranking import Effort, Ranked
from rillflow.planner.mapping.search import CostsOf, search
from rillflow.planner.objective import Objective
from rillflow.planner.problem import Problem

LITTLE = 0.10
"""A gain that is not worth doubling a cluster."""


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


def doubling(
    problem: Problem,
    costs: CostsOf,
    *,
    objective: Objective | None = None,
    freshness: Sequence[int] = (0,),
    apart_in_step: bool = False,
    times: Sequence[Fraction | int] = (1, 2, 4),
    effort: Effort | None = None,
) -> tuple[ClusterSize, ...]:
    """The best plan on so many times the machines, ascending; sizes that would cut a machine are left out.

    Args:
        problem: the step, on the cluster there is.
        costs: makes the cost model of a problem.
        objective: what is to be least; the step's seconds if nothing is said.
        freshness: bounds to try, as ``search`` has them.
        apart_in_step: whether bound 0 is tried with a sampler apart too.
        times: how much larger the clusters are, ascending.
        effort: how much each search may look at.
    """
    found: list[ClusterSize] = []
    for factor in sorted(times):
        hardware = _scaled(problem.hardware, Fraction(factor))
        if hardware is None:
            continue
        try:
            best = search(
                replace(problem, hardware=hardware),
                costs,
                objective=objective,
                freshness=freshness,
                apart_in_step=apart_in_step,
                effort=replace(effort or Effort(), kept=1, explains=False),
            ).best[0]
        except PlanError:
            best = None
        rows = problem.workload.rows / best.evaluation.step_s if best else 0.0
        before = found[-1].rows_per_s if found else 0.0
        found.append(
            ClusterSize(
                devices=sum(fleet.devices for fleet in hardware.fleets),
                best=best,
                rows_per_s=rows,
                gain=rows / before - 1 if before and best else None,
            )
        )
    return tuple(found)


def _scaled(hardware: Hardware, factor: Fraction) -> Hardware | None:
    """So many times the machines; none where that is no whole number of each kind."""
    fleets = []
    for fleet in hardware.fleets:
        machines = Fraction(fleet.devices, fleet.per_machine) * factor
        if machines.denominator != 1 or machines < 1:
            return None
        fleets.append(replace(fleet, devices=int(machines) * fleet.per_machine))
    return replace(hardware, fleets=tuple(fleets))
