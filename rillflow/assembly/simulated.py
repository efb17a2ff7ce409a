"""Simulated: a step as a run takes it, its stages' seconds measured or known.

problem, placement ─┐
seconds of stages ──┴─ k + 1 steps open, parts in order ─ simulate ─> Simulation
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rillflow.assembly.phases import PhasePlan
from rillflow.assembly.planning import plan_of
from rillflow.assembly.recipe import Recipe
from rillflow.planner.cost_model.given import GivenCosts
from rillflow.planner.problem import Problem
from rillflow.planner.simulator.layout import Settings
from rillflow.planner.simulator.result import Simulation
from rillflow.planner.simulator.simulate import simulate


def simulate_as_run(
    recipe: Recipe, phase: PhasePlan, problem: Problem, stages_s: Mapping[str, float], *, steps: int
) -> Simulation:
    """Steps of a phase as a run takes them: its placement, k + 1 steps open, the rows of each in order.

    Args:
        recipe: where its roles lie, and in how many parts rows go on.
        phase: one of it.
        problem: its step.
        stages_s: seconds of its stages by name; formulas give what is not among them.
        steps: how many, from the first one on.
    """
    parts = recipe.rollout.parts
    plan = replace(
        plan_of(recipe, problem.graph, problem.hardware.fleets[0]),
        freshness=phase.freshness,
        streams=recipe.placement.samples_apart and parts > 1 and phase.config.goes_by(parts),
    )
    planned = problem.of_plan(plan)
    costs = GivenCosts(planned, stages_s)
    return simulate(planned, costs, plan, steps=steps, settings=Settings(parts=parts))
