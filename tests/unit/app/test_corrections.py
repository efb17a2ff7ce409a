"""The default correction of a recipe whose tokens may be off-policy, and the notes about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from rillflow.algorithms.config import OnlineConfig
from rillflow.algorithms.registry import ALGORITHMS
from rillflow.app.bias_notes import correction_notes
from rillflow.app.recipe import load_recipe
from rillflow.app.resolved import Resolved
from rillflow.app.schedule_needs import bound_notes

NEW = {"hidden": 16, "layers": 1, "heads": 2, "context": 16, "alphabet": "0123456789+-="}
APART = {"backend": "inline", "pools": {"main": 1, "answers": 1}, "roles": {"sampler": "answers"}}
WEIGHTED = [name for name, each in ALGORITHMS.items() if issubclass(each.config, OnlineConfig)]
"""The algorithms whose loss takes a correction."""
UNWEIGHTED = ["online_dpo", "best_of_n"]
"""Algorithms that sample and run ahead, but use no sampler probabilities."""


def recipe(*settings: str, name: str = "grpo", freshness: int = 4) -> Resolved:
    algorithm: dict[str, Any] = {"name": name, "steps": 1}
    cost: dict[str, Any] = {"cost": {"function": "cost.py:cost"}} if name == "safe_rlhf" else {}
    sections: dict[str, Any] = {
        "rollout": {"max_tokens": 4},
        "policy": {"model": {"new": NEW}},
        "algorithm": algorithm,
        "schedule": {"mode": "ahead", "freshness": freshness},
        "placement": APART,
        **cost,
    }
    return load_recipe(sections, settings)


def correction(made: Resolved) -> str:
    assert isinstance(made.recipe.algorithm, OnlineConfig)
    return made.recipe.algorithm.loss.correction


def test_every_algorithm_of_the_policy_loss_is_covered() -> None:
    assert {"grpo", "ppo", "dapo", "gspo", "cispo", "rloo", "remax", "safe_rlhf"} <= {*WEIGHTED}


UNCLIPPED = ["gspo", "cispo"]
"""They use a ratio per row, or a clipped weight instead of a clipped ratio."""


@pytest.mark.parametrize("name", WEIGHTED)
def test_a_policy_loss_of_stale_rows_is_bounded_by_default(name: str) -> None:
    """Losses that clip token ratios clip those to the sampler; other losses get importance weights."""
    made = recipe(name=name)
    assert isinstance(made.recipe.algorithm, OnlineConfig)
    expected = ("tis", "trainer") if name in UNCLIPPED else ("none", "sampler")
    assert (correction(made), made.recipe.algorithm.old_logprobs) == expected
    fresh = recipe(name=name, freshness=0).recipe.algorithm
    assert isinstance(fresh, OnlineConfig)
    assert (fresh.loss.correction, fresh.old_logprobs) == ("none", "trainer")


@pytest.mark.parametrize("name", WEIGHTED)
def test_the_default_changes_one_setting(name: str) -> None:
    chosen = recipe('algorithm.loss.correction="none"', name=name).recipe.model_dump()
    if name in UNCLIPPED:
        chosen["algorithm"]["loss"]["correction"] = "tis"
    else:
        chosen["algorithm"]["old_logprobs"] = "sampler"
    assert recipe(name=name).recipe.model_dump() == chosen


@pytest.mark.parametrize("name", WEIGHTED)
def test_the_trainers_log_probabilities_bring_importance_weights(name: str) -> None:
    assert correction(recipe("algorithm.old_logprobs=trainer", name=name)) == "tis"


@pytest.mark.parametrize("name", UNWEIGHTED)
def test_a_loss_that_takes_no_correction_gets_none(name: str) -> None:
    made = recipe(name=name)
    assert "correction" not in str(made.recipe.model_dump()["algorithm"])
    assert correction_notes(made) == []


@pytest.mark.parametrize("chosen", ["none", "tis", "sequence_tis", "icepop", "m2po", "topr"])
def test_a_correction_that_the_recipe_names_is_kept(chosen: str) -> None:
    assert correction(recipe(f"algorithm.loss.correction={chosen}")) == chosen


def test_bounds_without_a_correction_are_those_of_the_default() -> None:
    made = recipe("algorithm.loss.correction_bounds=[0, 5]", "algorithm.old_logprobs=trainer")
    assert isinstance(made.recipe.algorithm, OnlineConfig)
    assert (made.recipe.algorithm.loss.correction, made.recipe.algorithm.loss.bounds) == ("tis", (0, 5))


def test_the_samplers_own_log_probabilities_leave_nothing_to_correct() -> None:
    assert correction(recipe("algorithm.old_logprobs=sampler")) == "none"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ([], ['old_logprobs is "sampler"', "the clip bounds the ratio"]),
        (["algorithm.old_logprobs=trainer"], ['"tis" with bounds [0, 2]', '"none" turns the weights off']),
        (["algorithm.loss.correction=m2po"], ['correction = "m2po" with bounds [0, 0.04]']),
        (["algorithm.loss.correction=none"], ["warning: ", 'correction is "none"', "clip never binds"]),
        (["algorithm.old_logprobs=sampler"], ['old_logprobs is "sampler"', "the clip bounds the ratio"]),
    ],
)
def test_what_weighs_stale_tokens_is_said_once(settings: Sequence[str], said: Sequence[str]) -> None:
    (note,) = correction_notes(recipe(*settings))
    assert "schedule.freshness is 4: tokens may be 4 versions old" in note
    assert all(each in note for each in said), note
    assert correction_notes(recipe(*settings, freshness=0)) == []


@pytest.mark.parametrize(
    ("freshness", "settings", "oldest"),
    [
        (0, ["algorithm.steps=1"], None),
        (11, ["algorithm.steps=12"], None),
        (12, ["algorithm.steps=12"], "11 versions"),
        (40, ["algorithm.steps=2"], "1 version "),
        (
            7,
            [
                "algorithm.steps=4",
                "schedule.mode=ready_first",
                "schedule.syncs_per_step=2",
                "algorithm.minibatches=2",
                "algorithm.shuffle=false",
            ],
            None,
        ),
    ],
)
def test_a_bound_that_no_token_can_reach_is_told(
    freshness: int, settings: Sequence[str], oldest: str | None
) -> None:
    notes = bound_notes(recipe(*settings, freshness=freshness))
    assert len(notes) == (0 if oldest is None else 1)
    if oldest is not None:
        assert (
            f"schedule.freshness is {freshness}, and no token of this phase can be more than {oldest}"
            in notes[0]
        )
