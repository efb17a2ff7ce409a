"""Recipes: loaded, overridden, named, and refused with all reasons at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rillflow.algorithms.config import OnlineConfig
from rillflow.app.recipe import load_recipe
from rillflow.app.sections import recipe_class
from rillflow.config.load import validate
from rillflow.errors import ConfigError

SMALL = """
[policy]
model.new = { hidden = 32, layers = 2, context = 64 }

[rollout]
max_tokens = 8

[algorithm]
name = "grpo"
steps = 3
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small" / "run.toml"
    path.parent.mkdir()
    path.write_text(SMALL)
    return path


def problems(path: Path, *overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_recipe(path, overrides)
    return caught.value


def test_a_small_recipe_is_defaults_but_for_what_it_says(small: Path) -> None:
    loaded = load_recipe(small)
    assert loaded.recipe.policy.model.new is not None
    assert loaded.recipe.policy.model.new.hidden == 32
    assert loaded.recipe.policy.lr == 1e-5
    assert loaded.recipe.warm_start is None
    assert isinstance(loaded.recipe.algorithm, OnlineConfig)
    assert loaded.recipe.algorithm.samples_per_prompt == 8
    assert loaded.total_steps == 3
    assert loaded.base == small.parent


def test_a_run_is_called_after_its_folder_or_its_file(small: Path) -> None:
    assert load_recipe(small).recipe.run.dir == "runs/small"
    other = small.with_name("faster.toml")
    other.write_text(SMALL)
    assert load_recipe(other).recipe.run.dir == "runs/faster"
    assert load_recipe(other, ["run.dir=here"]).recipe.run.dir == "here"


def test_settings_know_where_they_came_from(small: Path) -> None:
    given = load_recipe(small, ["policy.lr=1e-4", "warm_start.steps=2", "algorithm.steps=5"]).given
    assert given["policy.model.new.hidden"] == "run.toml"
    assert given["policy.lr"] == given["warm_start.steps"] == given["algorithm.steps"] == "--set"
    assert "policy.beta1" not in given


def test_an_override_can_add_and_remove_a_section(small: Path) -> None:
    assert load_recipe(small, ["warm_start.steps=2"]).total_steps == 5
    assert load_recipe(small, ["warm_start.steps=2", "warm_start=none"]).recipe.warm_start is None


def test_another_model_replaces_a_new_one(small: Path) -> None:
    loaded = load_recipe(small, ["policy.model.new=none", "policy.model.path=somewhere"])
    assert loaded.recipe.policy.model.path == "somewhere"


def test_the_resolved_recipe_comes_back_from_its_json(small: Path) -> None:
    recipe = load_recipe(small, ['rollout.stop=["="]', "warm_start.steps=2"]).recipe
    assert validate(recipe_class(), json.loads(recipe.model_dump_json()), "its JSON") == recipe


@pytest.mark.parametrize(
    ("setting", "what", "fix"),
    [
        ("policy.learning_rate=1", "policy.learning_rate = 1", "did you mean 'lr'?"),
        ("policy.steps=1", "policy.steps = 1", "algorithm.steps or warm_start.steps"),
        ("algoritm.steps=1", "algoritm = {steps = 1}", "did you mean 'algorithm'?"),
        ("algorithm.name=grpoo", 'algorithm.name is "grpoo"', "did you mean 'grpo'?"),
        ("algorithm.samples_per_prompt=1", "algorithm.samples_per_prompt is 1", "default, 8"),
        ("algorithm.steps=0", "algorithm.steps is 0", "another value"),
        ("algorithm.loss.clip_low=1.5", "algorithm.loss.clip_low is 1.5", "0.2"),
        ("algorithm.loss.aggregation=mean", 'algorithm.loss.aggregation is "mean"', "token_mean"),
        ("policy.lr=nan", "policy.lr is nan", "1e-05"),
        ("policy.lr=inf", "policy.lr is inf", "1e-05"),
        ("policy.lr=-1e-5", "policy.lr is -1e-05", "1e-05"),
        ('policy.lr="1e-5"', 'policy.lr is "1e-5"', "write 1e-5 without quotes"),
        ("policy=3", "policy is 3", "[policy]"),
        ("policy.model=Qwen", 'policy.model is "Qwen"', "[policy.model]"),
        ("run.device=gpu", 'run.device is "gpu"', "auto"),
        ("run.seed=-1", "run.seed is -1", "0"),
        ("run.seed=1.5", "run.seed is 1.5", "0"),
        ("run.checkpoint_every=-1", "run.checkpoint_every is -1", "0"),
        ("rollout.max_tokens=0", "rollout.max_tokens is 0", "256"),
        ("rollout.top_p=0", "rollout.top_p is 0", "1.0"),
        ("rollout.stop=x", 'rollout.stop is "x"', "[]"),
        ("task.held_out=-1", "task.held_out is -1", "500"),
        ("reward.timeout_s=0", "reward.timeout_s is 0", "10.0"),
        ("evaluate.problems=-1", "evaluate.problems is -1", "500"),
        ("policy.model.new.layers=0", "policy.model.new.layers is 0", "4"),
        ("policy.model.dtype=float16", 'policy.model.dtype is "float16"', "bfloat16"),
    ],
)
def test_a_bad_setting_is_refused_by_name_and_value(small: Path, setting: str, what: str, fix: str) -> None:
    error = problems(small, setting)
    assert what in error.what
    assert error.why
    assert fix in error.fix


def test_all_problems_are_said_at_once(small: Path) -> None:
    error = problems(small, "policy.lr=-1", "polcy.lr=1", "run.seed=x", "algorithm.name=none")
    assert f"{small} has 4 problems" in error.what
    for text in ("policy.lr is -1", "polcy = {lr = 1}", 'run.seed is "x"', "algorithm.name is none"):
        assert text in error.what


def test_an_empty_recipe_is_told_what_it_needs(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("")
    error = problems(path)
    assert "policy is missing" in error.what
    assert "algorithm is missing" in error.what


@pytest.mark.parametrize("role", ["reward", "cost"])
def test_a_role_that_scores_is_a_model_if_its_section_names_one(small: Path, role: str) -> None:
    algorithm = ["algorithm.name=safe_rlhf", "cost.function=cost.py:cost", "reward.function=reward.py:score"]
    functions = load_recipe(small, algorithm)
    named = load_recipe(small, [*algorithm, f"{role}.function=none", f"{role}.model=scorer"])
    assert role in functions.called
    assert {*named.models()} - {*functions.models()} == {role}
