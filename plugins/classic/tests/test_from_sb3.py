"""The page from Stable-Baselines3: its settings exist, and its recipe can run."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from rillflow.app.check import check_plugin_recipe
from rillflow.app.recipe import open_recipe
from rillflow.config.schema import walk
from rillflow_classic.algorithms.registry import ALGORITHMS, algorithm_of
from rillflow_classic.recipe import LoadedClassicRecipe, recipe_class

PAGE = Path(__file__).parents[3] / "docs/from_sb3.md"
KNOWN = {key.dotted for name in ALGORITHMS for key in walk(recipe_class(algorithm_of(name)))}


def unknown(text: str) -> Iterator[str]:
    """Yield the settings in the second column of tables that no recipe has."""
    for line in text.splitlines():
        cells = line.split("|") if line.startswith("|") else []
        for code in re.findall(r"`([^`]+)`", cells[2]) if len(cells) > 3 else ():
            name = code.partition("=")[0].strip()
            is_setting = re.fullmatch(
                r"(algorithm|environment|evaluate|network|run|workers)(\.[a-z_]+)+", name
            )
            if is_setting and name not in KNOWN:
                yield name


def test_every_setting_of_the_page_exists() -> None:
    text = PAGE.read_text("utf-8")
    assert list(unknown(text)) == []
    assert list(unknown("| `a` | `algorithm.lr`, `algorithm.rate = 1` | |")) == ["algorithm.rate"]


def test_the_recipe_of_the_page_makes_the_steps_that_it_says() -> None:
    found = re.search(r"```toml\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert found is not None
    loaded = open_recipe(tomllib.loads(found[1]))
    assert isinstance(loaded, LoadedClassicRecipe) and not check_plugin_recipe(loaded).problems
    workers = loaded.recipe.workers
    each = workers.slots * workers.steps
    assert (each * loaded.steps, each // loaded.recipe.algorithm.minibatches) == (30_720, 64)  # type: ignore[attr-defined]
