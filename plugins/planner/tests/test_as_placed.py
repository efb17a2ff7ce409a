"""A recipe's own placement as a plan: the one that is launched, with the seconds a plan of it would have."""

from __future__ import annotations

from pathlib import Path

import pytest

from plugins.planner.tests.test_commands import RECIPE
from rillflow.app.planned import is_placed_by, settings_of
from rillflow.app.recipe import load_recipe
from rillflow.app.resolved import Resolved
from rillflow.errors import PlanError
from rillflow_planner.cost_model.costs import CostModel
from rillflow_planner.problem import Statement
from rillflow_planner.recipe_problem import open_cluster, plan_as_placed, state_problem
from rillflow_planner.search import search

FLEET = '[[machine_type]]\nname = "{}"\ndevice = "cpu"\ndevices = 4\nper_machine = 4\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run.toml").write_text(RECIPE)
    (tmp_path / "one.toml").write_text(FLEET.format("cores"))
    (tmp_path / "two.toml").write_text(FLEET.format("cores") + FLEET.format("others"))
    return tmp_path


def stated(folder: Path, *settings: str, cluster: str = "one.toml") -> tuple[Resolved, Statement]:
    loaded = load_recipe(folder / "run.toml", settings)
    return loaded, state_problem(loaded, open_cluster(folder / cluster))


@pytest.mark.parametrize(
    "settings",
    [
        (),
        (
            "placement.pools.main=4",
            "placement.train_parallel.main={ fsdp = 2, tp = 2 }",
            "placement.rollout_parallel.tp=2",
        ),
        (
            "placement.pools={ main = 2, side = 1, functions = 1 }",
            'placement.roles={ critic = "side", reward = "functions" }',
        ),
    ],
)
def test_it_is_the_placement_that_runs(folder: Path, settings: tuple[str, ...]) -> None:
    loaded, statement = stated(folder, *settings)
    plan = plan_as_placed(loaded, statement)
    assert is_placed_by(plan, loaded.recipe.placement)
    assert plan.predicted_step_s > max(plan.predicted_stages_s.values()) > 0
    assert {stage.name for stage in statement.problem.graph.stages} == set(plan.predicted_stages_s)
    assert {pool.device for pool in plan.pools} == {"cpu"}


def test_a_plan_laid_over_a_recipe_is_expected_to_take_what_the_search_said(folder: Path) -> None:
    _, statement = stated(folder)
    for one in search(statement.problem, CostModel).best:
        plan = one.plan
        loaded, again = stated(folder, *settings_of(plan, ()))
        found = plan_as_placed(loaded, again)
        assert found.predicted_stages_s == pytest.approx(plan.predicted_stages_s)
        assert found.predicted_step_s == pytest.approx(plan.predicted_step_s)


def test_a_placement_the_cluster_cannot_hold_is_refused(folder: Path) -> None:
    loaded, statement = stated(folder, "placement.pools.main=8")
    with pytest.raises(PlanError, match="8"):
        plan_as_placed(loaded, statement)


def test_of_two_fleets_none_is_guessed(folder: Path) -> None:
    loaded, statement = stated(folder, cluster="two.toml")
    with pytest.raises(PlanError, match="cores and others") as caught:
        plan_as_placed(loaded, statement)
    assert caught.value.fix
