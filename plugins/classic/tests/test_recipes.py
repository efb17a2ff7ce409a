"""Shipped recipes: each can run, is described, and every algorithm has one."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from rillflow.app.check import check_plugin_recipe
from rillflow.app.recipe import open_recipe
from rillflow_classic.algorithms.registry import ALGORITHMS, algorithm_of
from rillflow_classic.environments.minatar_adapter import GAMES
from rillflow_classic.recipe import LoadedClassicRecipe

ROOT = Path(__file__).parents[3]
RECIPES = sorted((ROOT / "recipes/classic").glob("*/run.toml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.parent.name)
def test_a_shipped_recipe_can_run_and_is_described(path: Path) -> None:
    loaded = open_recipe(path)
    assert isinstance(loaded, LoadedClassicRecipe)
    problems = [str(each) for each in check_plugin_recipe(loaded).problems]
    if loaded.recipe.environment.id in GAMES and find_spec("minatar") is None:
        assert [each for each in problems if "minatar is not installed" not in each] == []
    else:
        assert problems == []
    assert loaded.recipe.evaluate.success is not None or not loaded.recipe.evaluate.episodes
    assert (path.parent / "README.md").read_text().count("\n") > 4
    assert f"recipes/classic/{path.parent.name}/README.md" in (ROOT / "plugins/classic/README.md").read_text()


def test_every_algorithm_has_its_name_and_a_recipe() -> None:
    assert {algorithm_of(name).name for name in ALGORITHMS} == ALGORITHMS.keys()
    loaded = [open_recipe(path) for path in RECIPES]
    named = {each.algorithm.name for each in loaded if isinstance(each, LoadedClassicRecipe)}
    assert named == ALGORITHMS.keys()
