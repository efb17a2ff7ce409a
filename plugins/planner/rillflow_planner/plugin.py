"""Plugin: attach the planner's commands and predictions to Rillflow. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rillflow.app.plugins import SHIPPED, Command, Plugin
from rillflow_planner import commands

if TYPE_CHECKING:
    from rillflow.algorithms.algorithm import Algorithm
    from rillflow.app.recipe import LoadedRecipe
    from rillflow.placement.plan import Plan
    from rillflow.runs.report.measured import Predict

HELP = SHIPPED["planner"]


class Planner:
    """The planner's predictions for a run and its report."""

    def predict_placement(
        self, loaded: LoadedRecipe, cluster: Path, lengths: Path | None, say: Callable[[str], None]
    ) -> Plan:
        """Return a recipe's own placement on a cluster with predicted seconds."""
        from rillflow.app.planned import require_for
        from rillflow_planner.plan_report import said_lines
        from rillflow_planner.recipe_problem import open_cluster, plan_as_placed, state_problem

        statement = state_problem(loaded, open_cluster(cluster), lengths)
        plan = plan_as_placed(loaded.recipe, statement)
        require_for(plan, loaded)
        say("\n".join(said_lines(statement)[1:]))
        return plan

    def predict_steps(self, algorithms: Sequence[Algorithm]) -> Predict:
        """Return the function that simulates steps of a run."""
        from rillflow_planner.simulated_run import simulate_steps

        return partial(simulate_steps, algorithms=algorithms)


PLUGIN = Plugin(
    commands={
        "plan": Command(help=HELP["plan"], run=commands.plan, add_arguments=commands.plan_arguments),
        "simulate": Command(
            help=HELP["simulate"], run=commands.simulate, add_arguments=commands.simulate_arguments
        ),
        "calibrate": Command(
            help=HELP["calibrate"], run=commands.calibrate, add_arguments=commands.calibrate_arguments
        ),
    },
    planning=Planner,
)
