"""Simulate: the door to the simulator.

plan ─ layout ─┬─ freshness 0 ─> in step
               └─ freshness k ─> streaming
"""

from __future__ import annotations

from rillflow.errors import PlanError
from rillflow.planner.option import Costs
from rillflow.planner.plan import Plan
from rillflow.planner.problem import Problem
from rillflow.planner.simulator.in_step import InStep
from rillflow.planner.simulator.layout import lay_out
from rillflow.planner.simulator.result import Simulation
from rillflow.planner.simulator.settings import Settings
from rillflow.planner.simulator.streaming import Streaming

MOST_STEPS = 100_000


def simulate(
    problem: Problem,
    costs: Costs,
    plan: Plan,
    *,
    steps: int,
    seed: int = 0,
    settings: Settings | None = None,
) -> Simulation:
    """Run steps of a plan, event by event.

    Args:
        problem: the step that is planned, with the plan's freshness.
        costs: its cost model.
        plan: where its units lie.
        steps: how many, from the first one on.
        seed: of lengths and of which devices are slow; the same seed gives the same simulation.
        settings: what is assumed beside the plan.

    Raises:
        PlanError: the plan does not fit, or asks for what is not simulated; a row that fits into no cache.
    """
    if not 1 <= steps <= MOST_STEPS:
        raise PlanError(f"{steps} steps", why=f"a simulation has between 1 and {MOST_STEPS:,}")
    layout = lay_out(problem, costs, plan, seed=seed, settings=settings or Settings())
    return Streaming(layout).run(steps) if plan.freshness else InStep(layout).run(steps)
