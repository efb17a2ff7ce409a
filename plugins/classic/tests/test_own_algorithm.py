"""Own algorithms: a file beside the recipe, which imports its neighbours, in every process."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import pytest

import rillflow
import rillflow_classic
from rillflow.app.recipe import open_recipe
from rillflow.errors import ConfigError
from rillflow_classic.build import Parts
from rillflow_classic.recipe import LoadedClassicRecipe

OWN = """
from dataclasses import replace

from pydantic import Field

from doubling import twice
from rillflow_classic.algorithm import ClassicAlgorithm
from rillflow_classic.algorithms.a2c import A2CConfig
from rillflow_classic.algorithms.ppo import plan
from rillflow_classic.on_policy import OnPolicyLearner


class OwnConfig(A2CConfig):
    '''Settings of the algorithm.'''

    factor: float = Field(1.0, description="Factor of the advantages.")


class OwnLearner(OnPolicyLearner):
    def estimates(self, data, starts):
        found = super().estimates(data, starts)
        return replace(found, advantages=twice(found.advantages) * self._settings.factor)


OWN = ClassicAlgorithm(name="own", config=OwnConfig, learner=OwnLearner, plan=plan)
"""
TOML = """
kind = "classic"
[environment]
id = "PointNavigation-v0"
[network]
hidden = [8]
[algorithm]
name = "own.py:OWN"
steps = 2
factor = 0.5
[workers]
actors = 2
slots = 2
steps = 16
[evaluate]
episodes = 2
video = false
[run]
threads = 1
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a recipe beside the files of its algorithm; the working directory is another one."""
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "own.py").write_text(OWN)
    (folder / "doubling.py").write_text("def twice(value):\n    return value * 2\n")
    (folder / "run.toml").write_text(TOML)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "doubling", raising=False)
    return folder / "run.toml"


@pytest.mark.parametrize("place", ["inline", pytest.param("process", marks=pytest.mark.slow)])
def test_a_file_beside_the_recipe_trains_and_its_policy_acts(recipe: Path, place: str) -> None:
    settings = {"workers.place": place}
    run = rillflow.train(recipe, dir="run", settings=settings, quiet=True)
    assert run.is_finished and run.settings["algorithm"]["name"] == "own.py:OWN"  # type: ignore[index, call-overload]
    assert {each["phase"] for each in run.metrics} == {"own"}
    policy = rillflow_classic.load(run.path)
    assert policy.evaluate().mean_reward == run.evaluations[-1].mean_reward


def test_twice_half_the_advantages_are_those_of_a2c(recipe: Path) -> None:
    own = rillflow.train(recipe, dir="runs/own", quiet=True)
    recipe.write_text(TOML.replace("own.py:OWN", "a2c").replace("factor = 0.5\n", ""))
    a2c = rillflow.train(recipe, dir="runs/a2c", quiet=True)
    assert [each["policy/loss/mean"] for each in own.metrics] == [
        each["policy/loss/mean"] for each in a2c.metrics
    ]


def test_settings_of_an_own_class_reach_a_process_that_has_not_imported_it(recipe: Path) -> None:
    loaded = open_recipe(recipe)
    assert isinstance(loaded, LoadedClassicRecipe)
    parts = Parts.of(loaded)
    sent = pickle.dumps(parts)
    del sys.modules[str(recipe.parent / "own.py")]
    again = pickle.loads(sent)  # noqa: S301
    assert again.settings.model_dump() == parts.settings.model_dump()
    assert type(again.settings).__name__ == "OwnConfig" and again.settings.factor == 0.5


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("owm.py:OWN", None, r"did you mean 'own\.py'"),
        ("own.py:OWNN", None, "did you mean 'OWN'"),
        ("own.py:OwnConfig", None, "did you mean 'OWN'|has no ClassicAlgorithm of the name 'OwnConfig'"),
        ("own:OWN", None, r"write file\.py:OWN, relative to the recipe"),
        ("own.py:OWN", "OWN = 1 / 0\n", r"ZeroDivisionError: division by zero, at .*own\.py"),
        ("own.py:OWN", "OWN = 1\n", "has no ClassicAlgorithm of the name 'OWN'"),
        ("own.py:OWN", "OWN = (\n", "own.py"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_clear_error(
    recipe: Path, name: str, text: str | None, told: str
) -> None:
    if text is not None:
        (recipe.parent / "own.py").write_text(text)
    settings: dict[str, Any] = {"algorithm.name": name}
    with pytest.raises(ConfigError, match=told):
        rillflow.train(recipe, dir="run", settings=settings, quiet=True)
