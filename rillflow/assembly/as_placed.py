"""As placed: what a recipe's own placement is expected to take, as a plan that a run is compared with.

recipe ─ its pools and grids ─┬─ evaluate ─> Plan with seconds of every stage; nothing is searched
cluster, lengths ─ Statement ─┘
"""

from __future__ import annotations

from rillflow.assembly.observed import plan_of
from rillflow.assembly.planning import told
from rillflow.assembly.recipe import Recipe
from rillflow.errors import PlanError
from rillflow.planner.cost_model.costs import CostModel
from rillflow.planner.evaluate import evaluate
from rillflow.planner.plan import Plan
from rillflow.planner.ranking import Ranked
from rillflow.planner.statement import Statement


def plan_as_placed(recipe: Recipe, statement: Statement) -> Plan:
    """The placement of a recipe on the one fleet of a cluster, with the seconds that are expected of it.

    Raises:
        PlanError: the cluster has several fleets, fewer devices than the recipe ranks, or too little memory.
    """
    problem = statement.problem
    fleets = problem.hardware.fleets
    if len(fleets) > 1:
        raise PlanError(
            f"the cluster has the fleets {' and '.join(fleet.name for fleet in fleets)}",
            why="a recipe does not say on which of them its ranks are",
            fix="give a cluster's file with the one that the run is on",
        )
    plan = plan_of(recipe, problem.graph, fleets[0].name)
    found = evaluate(problem, CostModel(problem), plan)
    return told(problem, Ranked(plan=plan, evaluation=found, value=found.step_s))
