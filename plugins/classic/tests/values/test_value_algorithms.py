"""DQN, Ape-X, SAC and two trainers: their plans run, learn, and go on exactly."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plugins.classic.tests.values.opened import OpenedRecipe
from plugins.classic.tests.values.written_fragments import random_stream
from rillflow.graph.drawing import as_text
from rillflow.records.metrics import Metrics, merge_metrics
from rillflow_classic.algorithms.apex import RateLimiter
from rillflow_classic.build import make_actor
from rillflow_classic.operators.context import NotReady, PlanContext

SMALL = {"batch_size": 32, "learning_starts": 64, "updates": 4}
NETWORK = {"hidden": [32], "activation": "relu"}
POLICIES = {"ppo": "agent_[02]", "dqn": "agent_[13]"}
QUICK: dict[str, dict[str, Any]] = {
    "dqn": {"algorithm": {"name": "dqn", **SMALL}},
    "apex": {"algorithm": {"name": "apex", **SMALL, "shards": 2}},
    "sac": {"algorithm": {"name": "sac", **SMALL}, "environment": {"id": "Pendulum-v1"}},
    "two_trainers": {
        "algorithm": {"name": "two_trainers", "dqn": SMALL, "ppo": {"minibatches": 1}},
        "environment": {"id": "MultiAgentCartPole-v0"},
        "policies": POLICIES,
    },
}
POINT = {"id": "PointNavigation-v0", "run": "inline"}
RESUMED: dict[str, dict[str, Any]] = {
    **QUICK,
    "maml": {"algorithm": {"name": "maml"}, "environment": POINT},
    "mb_mpo": {
        "algorithm": {"name": "mb_mpo", "members": 2, "imagined": 4, "updates": 2, "model_steps": 10},
        "environment": POINT,
    },
}


def opened(stack: ExitStack, name: str, **workers: Any) -> OpenedRecipe:
    tables = {"environment": {"id": "CartPole-v1"}, **RESUMED[name]}
    algorithm = tables.pop("algorithm")
    found = {"slots": 4, "steps": 16, **workers}
    return OpenedRecipe(stack, algorithm, workers=found, network=NETWORK, run={"threads": 1}, **tables)


def weights(recipe: OpenedRecipe) -> dict[str, Any]:
    return {
        f"{policy}.{name}": value
        for policy, learner in recipe.system.learners.items()
        for name, value in learner.weights().items()
    }


@pytest.mark.parametrize("name", QUICK)
def test_a_plan_acts_stores_and_learns(name: str) -> None:
    with ExitStack() as stack:
        recipe = opened(stack, name)
        before = weights(recipe)
        metrics: Metrics = merge_metrics(recipe.steps(4))
        assert metrics["actor/steps/sum"].value > 0
        losses = [name for name in metrics if name.startswith("policy/") and name.endswith("loss/mean")]
        assert losses and all(np.isfinite(metrics[name].value) for name in losses)
        assert all(learner.version > 0 for learner in recipe.system.learners.values())
        after = weights(recipe)
        assert all(
            any(not np.array_equal(after[k], before[k]) for k in after if k.startswith(policy))
            for policy in recipe.system.learners
        )


@pytest.mark.parametrize("name", QUICK)
def test_a_plan_is_checked_and_drawn(name: str) -> None:
    with ExitStack() as stack:
        recipe = opened(stack, name)
        plan: Any = recipe.loaded.algorithm.plan(recipe.system, recipe.loaded.settings)
        plan.check()
        assert "replay" in as_text(plan.graph(name))


@pytest.mark.parametrize("name", ["dqn", "sac", "two_trainers", "maml", "mb_mpo"])
def test_a_resumed_run_has_the_weights_of_an_uninterrupted_one(name: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        recipe = opened(stack, name)
        keep = recipe.system.kept.keep
        for policy, learner in recipe.system.learners.items():
            keep(policy, lambda learner=learner: learner)
        list(recipe.steps(4, seed=1))
        states = json.loads(json.dumps(recipe.system.kept.write(tmp_path)))
        list(recipe.steps(3, seed=2))
        wanted = weights(recipe)
    with ExitStack() as stack:
        recipe = opened(stack, name)
        for policy, learner in recipe.system.learners.items():
            recipe.system.kept.keep(policy, lambda learner=learner: learner)

        class Saved:
            path, state = tmp_path, {"objects": states}

        recipe.system.kept.read(Saved)
        list(recipe.steps(3, seed=2))
        found = weights(recipe)
    assert all(np.array_equal(found[key], wanted[key]) for key in wanted)


@pytest.mark.slow
def test_apex_runs_its_three_flows_in_processes() -> None:
    with ExitStack() as stack:
        recipe = opened(stack, "apex", actors=2, place="process")
        metrics = merge_metrics(recipe.steps(6))
        assert recipe.system.learner.version == 24
        assert metrics["actor/steps/sum"].value > 64
        state = recipe.system.kept._objects["replay"].state()
        assert state.keys() == {"0", "1"}


def test_the_actors_of_apex_explore_with_their_own_epsilons() -> None:
    """Half of the actions of actor 0 are random, and none of actor 1."""
    with ExitStack() as stack:
        ladder = {"epsilon_first": 0.5, "ladder": 1000}
        tables = {"workers": {"actors": 2, "slots": 1, "steps": 64}, "environment": {"id": "CartPole-v1"}}
        parts = OpenedRecipe(stack, {"name": "apex", **SMALL, **ladder}, **tables).parts
        for index, is_greedy in enumerate((False, True)):
            actor = make_actor(parts, None, index)
            fragment: Any = actor.sample()
            actor.close()
            assert np.array_equal(fragment.outputs["chosen"], fragment.outputs["best"]) == is_greedy


@pytest.mark.parametrize("ratio", [2.0, 40.0])
def test_apex_keeps_frames_and_updates_in_proportion(ratio: float) -> None:
    """Each turn of the flows takes up to 20 fragments of 64 frames, or as many updates, without a ratio."""
    with ExitStack() as stack:
        tables = {"environment": {"id": "CartPole-v1"}, "workers": {"slots": 4, "steps": 16}}
        recipe = OpenedRecipe(stack, {"name": "apex", **SMALL, "frames_per_update": ratio}, **tables)
        frames, slack = 0.0, 2 * 64 + 64
        for metrics in recipe.steps(50):
            if "actor/steps/sum" in metrics:
                frames += metrics["actor/steps/sum"].value
            assert abs(frames - ratio * recipe.system.learner.version) <= slack
        assert recipe.system.learner.version == 200


def test_the_flow_that_is_ahead_waits() -> None:
    limiter, fragment = RateLimiter(3.0, slack=6), random_stream(4, 1, 0, ending=0)
    played = limiter.play().begin(PlanContext())
    assert [isinstance(played(fragment), NotReady) for _ in range(3)] == [False, False, True]
    assert [limiter.learns() is None for _ in range(5)] == [True, True, True, True, True]  # 8 - 15 = -7
    assert isinstance(limiter.learns(), NotReady)
    assert played(fragment) is fragment
    unlimited = RateLimiter(0.0, slack=6)
    played = unlimited.play().begin(PlanContext())
    assert all(played(fragment) is fragment and unlimited.learns() is None for _ in range(9))


def learns(algorithm: dict[str, Any], environment: str, steps: int, at_least: float) -> None:
    with ExitStack() as stack:
        tables = {"environment": {"id": environment}, "workers": {"slots": 8, "steps": 16}}
        network = {"hidden": [64, 64], "activation": "relu"}
        recipe = OpenedRecipe(stack, algorithm, network=network, run={"threads": 1}, **tables)
        for _ in recipe.steps(steps):
            pass
        assert recipe.evaluated(recipe.system.learner.policy) > at_least


def test_dqn_learns() -> None:
    """Random actions hold the pole for 22 steps."""
    settings = {"lr": 1e-3, "num_steps": 3, "batch_size": 64, "updates": 32, "target_every": 50}
    fast = {"huber": 1e4, "epsilon_updates": 1000, "learning_starts": 500}
    learns({"name": "dqn", **settings, **fast}, "CartPole-v1", 50, 80)


@pytest.mark.slow
def test_apex_learns() -> None:
    settings = {"lr": 1e-3, "batch_size": 64, "updates": 64, "target_every": 50, "huber": 1e4}
    learns({"name": "apex", **settings, "learning_starts": 500}, "CartPole-v1", 30, 80)


@pytest.mark.slow
def test_sac_learns() -> None:
    """Random torques reach about -1200; a pendulum that is held, about -150."""
    settings = {"lr": 1e-3, "batch_size": 128, "updates": 128, "learning_starts": 1000}
    learns({"name": "sac", **settings}, "Pendulum-v1", 70, -500)
