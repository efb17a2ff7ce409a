"""Configs that older versions wrote: each order of a step has its present section, with the same values."""

from __future__ import annotations

from typing import Any

import pytest

from rillflow.app.recipe import Recipe
from rillflow.config.load import validate
from rillflow.runs.old_settings import present

ALGORITHM: dict[str, Any] = {
    "freshness": 0,
    "async_mode": "in_order",
    "on_stale": "wait",
    "syncs_per_step": 1,
    "oversample_prompts": 1.0,
    "oversample_samples": 1.0,
}
ROLLOUT: dict[str, Any] = {
    "stream_chunks": 1,
    "gather_rows": 0,
    "gather_replicas": 0,
    "gather_by": "cache",
    "keep_cache": False,
}
"""The settings of both sections as version f49358cd wrote them."""
READY = {"async_mode": "ready_first", "freshness": 2}
TWO = {"pools": {"main": 2}, "train_parallel": {"main": {"dp": 2}}}
APART = {"pools": {"main": 1, "answers": 2}, "roles": {"sampler": "answers"}}
NEW = {"hidden": 16, "layers": 1, "heads": 2, "context": 32, "alphabet": "0123456789+-="}


@pytest.mark.parametrize(
    ("algorithm", "rollout", "placement", "schedule"),
    [
        ({}, {}, {}, {"mode": "in_order"}),
        ({}, {"stream_chunks": 3}, APART, {"mode": "streamed", "stream_chunks": 3}),
        (
            {"freshness": 1},
            {"stream_chunks": 2},
            APART,
            {"mode": "ahead", "freshness": 1, "stream_chunks": 2},
        ),
        (
            {**READY, "on_stale": "drop", "syncs_per_step": 2},
            {"keep_cache": True},
            APART,
            {
                "mode": "ready_first",
                "freshness": 2,
                "on_stale": "drop",
                "syncs_per_step": 2,
                "keep_cache": True,
                "stream_chunks": 1,
            },
        ),
        (
            {"oversample_samples": 1.5},
            {},
            {},
            {"mode": "tail_batching", "oversample_prompts": 1.0, "oversample_samples": 1.5},
        ),
        (
            {},
            {"gather_rows": 6, "gather_replicas": 1, "gather_by": "tokens"},
            TWO,
            {"mode": "gathering", "gather_rows": 6, "gather_replicas": 1, "gather_by": "tokens"},
        ),
    ],
)
def test_an_old_config_is_read_with_its_order(
    algorithm: dict[str, Any], rollout: dict[str, Any], placement: dict[str, Any], schedule: dict[str, Any]
) -> None:
    same = {"name": "grpo", "steps": 3, "prompts_per_step": 6, "minibatches": 2, "shuffle": False}
    old: dict[str, Any] = {
        "policy": {"model": {"new": NEW}},
        "algorithm": {**same, **ALGORITHM, **algorithm},
        "rollout": {"max_tokens": 4, **ROLLOUT, **rollout},
        "placement": {"backend": "inline", **placement},
    }
    now = present(old)
    assert now["schedule"] == schedule and now["algorithm"] == same and now["rollout"] == {"max_tokens": 4}
    assert present(now) == now, "a config of today is returned as it is"
    recipe = validate(Recipe, now, "config.json")
    assert recipe.schedule.model_dump() == schedule, "so that a resume finds no changed setting"


def test_a_config_that_lacks_settings_of_later_versions_has_their_defaults() -> None:
    bare = {"algorithm": {"freshness": 2, "async_mode": "ready_first"}, "rollout": {"gather_by": "cache"}}
    assert present(bare)["schedule"] == {
        "mode": "ready_first",
        "freshness": 2,
        "on_stale": "wait",
        "syncs_per_step": 1,
        "keep_cache": False,
        "stream_chunks": 1,
    }
    assert present({"algorithm": {"name": "sft"}, "rollout": {}})["schedule"] == {"mode": "in_order"}


@pytest.mark.parametrize("config", [{"kind": "classic", "algorithm": {"freshness": 1}}, {}])
def test_a_config_without_rollouts_is_returned_as_it_is(config: dict[str, Any]) -> None:
    assert present(config) == config
