"""PPO learns CartPole with the recipe that is shipped."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

import pytest

from rillflow.records.metrics import Mean
from rillflow_classic.build import Parts, open_system
from rillflow_classic.recipe import LoadedClassicRecipe

RECIPE = Path(__file__).parents[3] / "recipes/classic/ppo_cartpole/run.toml"


def mean_return(parts: Sequence[Mean]) -> float:
    return sum(each.total for each in parts) / sum(each.count for each in parts)


def returns_of(seed: int, updates: int) -> list[Mean]:
    """Make updates of the recipe's plan; return the returns of the episodes that ended in each."""
    data = {**tomllib.loads(RECIPE.read_text()), "run": {"seed": seed}}
    loaded = LoadedClassicRecipe.of(RECIPE, data, ())
    with ExitStack() as stack:
        system = open_system(Parts.of(loaded), stack)
        system.reset(seed)
        items = islice(iter(loaded.algorithm.plan(system, loaded.settings)), updates)
        return [item["episode/return/mean"] for item in items]


def test_the_return_of_ppo_doubles() -> None:
    returns = returns_of(seed=0, updates=40)
    assert mean_return(returns[-10:]) > 2 * mean_return(returns[:10])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_ppo_balances_the_pole(seed: int) -> None:
    returns = returns_of(seed, updates=400)
    assert max(mean_return(returns[first : first + 40]) for first in range(0, 361, 20)) >= 475
