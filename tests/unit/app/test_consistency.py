"""Settings that are each valid but conflict; the error shows the arithmetic."""

from __future__ import annotations

from typing import Any

import pytest

from rillflow.app.batch_arithmetic import batch_lines
from rillflow.app.recipe import load_recipe
from rillflow.app.resolved import Resolved
from rillflow.errors import ConfigError

SMALL: dict[str, dict[str, Any]] = {
    "policy": {"model": {"new": {"hidden": 32, "heads": 4, "kv_heads": 2, "context": 64}}},
    "rollout": {"max_tokens": 8},
    "algorithm": {"name": "grpo", "steps": 3, "prompts_per_step": 4, "samples_per_prompt": 8},
}


def recipe(**sections: dict[str, Any]) -> Resolved:
    """Return the small recipe with replaced keys of sections."""
    data = {name: {**SMALL.get(name, {}), **keys} for name, keys in {**SMALL, **sections}.items()}
    return load_recipe(data)


def refusal(**sections: dict[str, Any]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        recipe(**sections)
    return caught.value


def new(**sizes: int) -> dict[str, Any]:
    return {"model": {"new": {"hidden": 32, "heads": 4, "kv_heads": 2, "context": 64, **sizes}}}


def test_the_small_recipe_is_consistent() -> None:
    assert recipe().recipe.algorithm.steps == 3


@pytest.mark.parametrize(
    ("sections", "what", "why"),
    [
        ({"algorithm": {"minibatches": 33}}, "minibatches is 33", "4 prompts x 8 samples = 32 rows"),
        ({"policy": new(heads=5, kv_heads=5)}, "heads is 5 and hidden is 32", "32 / 5 leaves 2"),
        ({"policy": new(kv_heads=3)}, "kv_heads is 3 and heads is 4", "4 / 3 leaves 1"),
        ({"policy": new(hidden=12)}, "hidden is 12 and heads is 4", "even head size, not 3"),
        ({"rollout": {"max_tokens": 64}}, "max_tokens is 64", "0 tokens remain for the prompt"),
        ({"rollout": {"temperature": 0}}, "rollout.temperature is 0", "identical"),
        (
            {"evaluate": {"samples": 4}},
            "evaluate.samples is 4, and evaluate.temperature is 0",
            "identical",
        ),
        ({"algorithm": {"name": "dapo", "overlong_buffer": 9}}, "overlong_buffer is 9", "fewer"),
        ({"algorithm": {"truncated": "bootstrap"}}, "grpo has no critic", "a critic must estimate"),
        ({"policy": {"model": {}}}, "neither path nor new", "needs a model to start from"),
        ({"policy": {"model": {"path": "x", "new": {}}}}, 'both path = "x" and new', "one model"),
        ({"policy": {"final_lr": 0.1}}, "policy.final_lr is 0.1", "no final learning rate"),
        (
            {"policy": {"warmup_steps": 3, "schedule": "cosine"}},
            "policy.warmup_steps is 3",
            "3 optimiser steps",
        ),
        ({"placement": {"pools": {"main": 0}}}, "placement.pools.main is 0", "at least one rank"),
        (
            {"placement": {"pools": {"main": 1, "scorer": 1}, "roles": {"reward": "scorers"}}},
            "placement.roles.reward is 'scorers'",
            "the pools are main, scorer",
        ),
        (
            {"placement": {"roles": {"rewart": "main"}}},
            "'rewart', and the run has no such role",
            "policy, reward",
        ),
        (
            {"placement": {"pools": {"a": 1, "b": 1}, "roles": {"critic": "b"}}},
            "'critic', and the run has no such role",
            "grpo with these settings has policy, reward",
        ),
        (
            {"placement": {"pools": {"a": 1, "b": 1}}},
            "placement.pools.b has no role",
            "the roles policy, reward, sampler are on a;",
        ),
    ],
)
def test_a_contradiction_is_refused_with_its_arithmetic(
    sections: dict[str, dict[str, Any]], what: str, why: str
) -> None:
    error = refusal(**sections)
    assert what in error.what
    assert why in error.why
    assert error.fix


def test_all_contradictions_are_said_at_once() -> None:
    error = refusal(algorithm={"minibatches": 33}, rollout={"max_tokens": 64, "temperature": 0})
    assert "3 problems" in error.what


def test_a_divisor_is_proposed() -> None:
    assert "heads = 4" in refusal(policy=new(heads=5, kv_heads=1)).fix


def test_greedy_sampling_is_fine_where_nothing_is_sampled() -> None:
    supervised = {"name": "sft", "steps": 3}
    data = {**SMALL, "algorithm": supervised, "rollout": {"temperature": 0, "max_tokens": 8}}
    assert load_recipe(data).recipe.rollout.temperature == 0


def test_the_arithmetic_of_a_run() -> None:
    warm = {"steps": 10, "prompts_per_step": 16}
    lines = batch_lines(recipe(warm_start=warm, algorithm={"minibatches": 3, "epochs": 2}).recipe)
    assert lines == [
        "warm start: 10 steps x 16 rows = 160 rows",
        "a step: 4 prompts x 8 samples = 32 rows, trained in 3 minibatches of 11 or 10 rows",
        "the run: 3 steps x 2 epochs x 3 minibatches = 18 optimiser steps on 96 rows",
        "sampled: 96 rows x 8 tokens = 768 tokens at most",
    ]


def test_the_arithmetic_of_a_step_that_begins_more_than_it_trains() -> None:
    begins_more = {"mode": "tail_batching", "oversample_prompts": 1.5, "oversample_samples": 1.25}
    lines = batch_lines(recipe(schedule=begins_more).recipe)
    assert "started: 6 prompts x 10 samples a step; later steps train the longest" in lines
    assert len(lines) == 1 + len(batch_lines(recipe().recipe))


def test_the_arithmetic_of_whole_minibatches() -> None:
    assert "1 minibatch of 32 rows" in batch_lines(recipe().recipe)[0]


def test_a_warm_start_has_a_learning_rate_of_its_own_and_the_policys_optimiser() -> None:
    policy = {**SMALL["policy"], "lr": 1e-4, "beta2": 0.99, "weight_decay": 0.3, "max_grad_norm": 7.0}
    first, second = recipe(policy=policy, warm_start={"steps": 5, "lr": 1e-2}).phases
    assert (first.train.lr, first.train.beta2, first.train.weight_decay) == (1e-2, 0.95, 0.3)
    assert (second.train.lr, second.train.beta2, second.train.max_grad_norm) == (1e-4, 0.99, 7.0)
    assert first.train.max_grad_norm == 7.0


@pytest.mark.parametrize(
    ("setting", "value"), [("on_stale", "drop"), ("syncs_per_step", 2), ("keep_cache", True)]
)
def test_a_setting_of_rows_that_meet_new_weights_is_refused_where_none_does(
    setting: str, value: object
) -> None:
    same = {"placement": {"backend": "inline"}, "algorithm": {"minibatches": 2, "shuffle": False}}
    schedule = {"mode": "ready_first", setting: value}
    assert f"schedule.{setting} is " in str(refusal(schedule=schedule, **same))
    assert f"set schedule.freshness = 1, or remove schedule.{setting}" in str(
        refusal(schedule=schedule, **same)
    )
    recipe(schedule={**schedule, "freshness": 1}, **same)


@pytest.mark.parametrize(
    "schedule", [{"mode": "ahead"}, {"mode": "ready_first"}, {"mode": "gathering", "gather_rows": 2}]
)
def test_an_order_of_sampled_rows_needs_an_algorithm_that_samples(schedule: dict[str, object]) -> None:
    data = {"policy": SMALL["policy"], "algorithm": {"name": "sft", "steps": 1}, "schedule": schedule}
    with pytest.raises(ConfigError, match="and sft samples no rows"):
        load_recipe(data)


def test_ready_first_needs_a_sampler_on_its_own_ranks() -> None:
    error = refusal(schedule={"mode": "ready_first"}, placement={"pools": {"main": 1}})
    assert error.what.startswith('schedule.mode is "ready_first", and the sampler shares its ranks')
