"""Every shipped recipe parses and has a README in its folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from rillflow.app.recipe import load_recipe

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*/*.toml"))


def test_recipes_are_shipped() -> None:
    assert "arithmetic" in [path.parent.name for path in RECIPES]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_shipped_recipe_is_valid(path: Path) -> None:
    loaded = load_recipe(path)
    assert loaded.base == path.parent
    assert loaded.given, "a recipe without a setting is none"
    assert (path.parent / "README.md").is_file()
