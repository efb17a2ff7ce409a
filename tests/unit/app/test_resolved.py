"""Resolved recipes: what a change computes again, which settings are open, and what a recorded one keeps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rillflow.algorithms.grpo import ALGORITHM, GRPOConfig
from rillflow.app.consistency import contradictions
from rillflow.app.contradictions import Contradiction
from rillflow.app.recipe import load_recipe
from rillflow.app.recorded_recipe import resolve_config
from rillflow.app.resolved import Resolved
from rillflow.errors import ConfigError
from rillflow.formulas.config import PolicyLossConfig

SMALL: dict[str, Any] = {
    "policy": {"model": {"new": {"hidden": 16, "layers": 1, "heads": 2, "context": 16}}},
    "rollout": {"max_tokens": 4},
    "algorithm": {"name": "grpo", "steps": 3},
}


def recipe(*settings: str) -> Resolved:
    return load_recipe(SMALL, settings)


def test_a_change_computes_only_what_it_affects() -> None:
    loaded = recipe()
    same = loaded.changed({"run.threads": 2, "policy.model.path": "elsewhere"})
    assert same.found is loaded.found and same.recipe.run.threads == 2
    assert loaded.changed({}) is loaded.changed({"run.seed": 0}) is loaded
    faster = loaded.changed({"policy.lr": 0.5})
    assert faster.main.train.lr == 0.5 and faster.main.heard is loaded.main.heard
    anchored = loaded.changed({"algorithm.loss.kl": 0.5})
    assert {*anchored.called} - {*loaded.called} == {"reference"}
    scored = loaded.changed({"reward.model": "scorer"})
    assert {*scored.roles} - {*loaded.roles} == {"eval_reward"} and scored.scorers == {
        "reward.model": "scorer"
    }
    assert loaded.recipe.run.threads == 0 and loaded.recipe.policy.lr != 0.5, "the recipe itself is as before"


@pytest.mark.parametrize(
    ("settings", "setting", "is_open"),
    [
        ((), "policy.lr", True),
        (("policy.lr=auto",), "policy.lr", True),
        (("policy.lr=0.5",), "policy.lr", False),
        (("policy.lr=0.5", "policy.lr=auto"), "policy.lr", True),
        ((), "policy.model.new", False),
        (("placement.pools={ main = 1 }",), "placement.pools", False),
        (("placement.roles={}",), "placement.roles", False),
        (("placement.backend=inline",), "placement.pools", True),
        (("policy.model.dtype=float32", "policy.model={ path = 'x' }"), "policy.model.dtype", True),
    ],
)
def test_a_setting_is_open_where_no_value_is_written_for_it(
    settings: tuple[str, ...], setting: str, is_open: bool
) -> None:
    assert recipe(*settings).is_open(setting) is is_open


def test_a_correction_that_an_algorithm_brings_is_not_a_default() -> None:
    class Own(GRPOConfig):
        loss: PolicyLossConfig = PolicyLossConfig(correction="icepop")

    own = replace(ALGORITHM, config=Own)
    stale = ('schedule={mode="ahead",freshness=1}', "placement.backend=inline")
    for more in ((), ("algorithm.loss.kl=0.1",)):
        config = load_recipe(SMALL, (*stale, *more), [own]).recipe.algorithm
        assert isinstance(config, Own)
        assert (config.loss.correction, config.old_logprobs) == ("icepop", "trainer")


def test_a_recorded_recipe_is_the_one_that_was_recorded(tmp_path: Path) -> None:
    loaded = recipe('schedule={mode="ahead",freshness=2}', "warm_start.steps=1")
    config = loaded.recipe.model_dump(mode="json")
    kept = resolve_config(tmp_path, {**config, "data": {}, "sources": {}}, tmp_path)
    assert kept.recipe == loaded.recipe and not kept.is_open("placement.pools")
    assert [phase.name for phase in kept.phases] == ["warm_start", "grpo"]
    del config["algorithm"]["old_logprobs"], config["algorithm"]["loss"]["correction"]  # an earlier version
    assert resolve_config(tmp_path, config, tmp_path).recipe == loaded.recipe
    with pytest.raises(ConfigError, match="kind"):
        resolve_config(tmp_path, {"kind": "classic"}, tmp_path)


def test_a_contradiction_is_a_record_with_its_setting_and_states_an_error() -> None:
    broken = recipe().changed({"algorithm.minibatches": 10**6, "rollout.temperature": 0.0})
    assert [each.setting for each in contradictions(broken)] == [
        "algorithm.minibatches",
        "rollout.temperature",
    ]
    (minibatches, _) = contradictions(broken)
    assert minibatches.error.what == "algorithm.minibatches is 1000000" and "512 rows" in minibatches.why
    error = ConfigError("tp is 3 in placement.train_parallel", why="a", fix="b")
    found = Contradiction.of(error)
    assert (found.setting, str(found.error)) == ("tp", str(error))
