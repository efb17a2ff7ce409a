"""MAML and MB-MPO: gradients through the inner step, tasks in slots, models, and their controls."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from plugins.classic.tests.test_on_policy import inputs, play
from plugins.classic.tests.values.opened import OpenedRecipe
from rillflow.errors import ConfigError, TrainingError
from rillflow.records.metrics import Metrics
from rillflow_classic.algorithms.a2c import A2CConfig
from rillflow_classic.algorithms.maml import MamlConfig, MamlLearner
from rillflow_classic.algorithms.mb_mpo import (
    ImaginedEnvironment,
    MbMpoConfig,
    MbMpoLearner,
    Models,
    search,
)
from rillflow_classic.environments.config import EnvironmentSettings
from rillflow_classic.environments.make import make_environment
from rillflow_classic.environments.point_navigation import PointNavigation
from rillflow_classic.fragment import Array, Fragment
from rillflow_classic.networks.acting import weights_of
from rillflow_classic.networks.task_policy import TaskPolicy
from rillflow_classic.on_policy import Estimates, OnPolicyLearner
from rillflow_classic.operators.context import PlanContext
from rillflow_classic.policy import Weights
from rillflow_classic.replay import ReplayBuffer

POINT = {"id": "PointNavigation-v0", "run": "inline"}


class GivenAdvantages(MamlLearner):
    """MAML with the estimates of A2C, which depend on no task."""

    def estimates(self, data: Fragment, starts: torch.Tensor) -> Estimates:
        """Return A2C's."""
        return OnPolicyLearner.estimates(self, data, starts)


def opened(stack: ExitStack, name: str, **algorithm: Any) -> OpenedRecipe:
    workers = algorithm.pop("workers", {"slots": 4, "steps": 42})
    environment = {**POINT, "arguments": algorithm.pop("arguments", {})}
    return OpenedRecipe(
        stack,
        {"name": name, **algorithm},
        environment=environment,
        workers=workers,
        network={"hidden": [64, 64]},
        run={"threads": 1},
    )


def test_every_slot_keeps_its_task_until_the_next_seed() -> None:
    environment = make_environment(EnvironmentSettings(**POINT), 5, seed=1)

    def rewards(seed: int | None) -> Array:
        if seed is not None:
            environment.reset(seed)
        return environment.step(np.ones((5, 2), np.float32)).rewards.copy()

    first = rewards(1)
    assert len(set(first.tolist())) == 5
    for _ in range(20):  # the end of the episode, and its reset
        rewards(None)
    np.testing.assert_array_equal(rewards(None), first)
    assert not np.isin(rewards(2), first).any()
    np.testing.assert_array_equal(rewards(1), first)


def test_a_task_can_be_given() -> None:
    point = PointNavigation(goal=0.0, speed=0.5)
    point.reset(seed=3)
    assert point.step(np.array([2.0, 0.0]))[1] == 0
    point.reset(options={"goal": np.pi})
    assert point.step(np.array([-2.0, 0.0]))[1] == pytest.approx(0)


def test_tasks_act_with_weights_of_their_own() -> None:
    learners = [OnPolicyLearner(replace(inputs(), seed=seed)) for seed in range(3)]
    policy, observations = TaskPolicy(learners[0].network), np.ones((4, 3), np.float32)
    policy.load_tasks(7, [each.weights() for each in learners[1:]])
    acted = policy.act(observations, greedy=True)
    for part, learner in ((slice(0, 2), learners[1]), (slice(2, 4), learners[2])):
        wanted = learner.policy.act(observations[part], greedy=True)
        np.testing.assert_array_equal(acted.outputs["values"][part], wanted.outputs["values"])
    policy.load(8, learners[0].weights())
    wanted = learners[0].policy.act(observations, greedy=True)
    found = policy.act(observations, greedy=True)
    np.testing.assert_array_equal(found.outputs["values"], wanted.outputs["values"])


def meta_gradient(learner: MamlLearner, pairs: list[tuple[Fragment, Fragment]]) -> torch.Tensor:
    learner.update(pairs)
    return learner._gradient.clone()


def test_the_first_order_meta_gradient_is_that_of_a2c_with_the_adapted_weights() -> None:
    settings = {"inner_lr": 0.3, "normalise_advantages": False, "max_gradient_norm": 1e6}
    learner = GivenAdvantages(inputs(MamlConfig(**settings)), slots_per_task=4)
    before = play(learner, 1)
    adapted = OnPolicyLearner(inputs(A2CConfig(value_weight=0.0, entropy_weight=0.0, lam=0.95)))
    plain, _ = adapted.gradients(before)
    own = learner.weights()
    stepped = {n: value - 0.3 * by.numpy() for (n, value), by in zip(own.items(), plain, strict=True)}
    (weights,) = learner.adapted(before)
    for name, value in stepped.items():
        np.testing.assert_allclose(weights[name], value, atol=1e-6)
    adapted.policy.load(0, weights)
    after = play(adapted, 2)
    wanted = torch.cat([each.flatten() for each in adapted.gradients(after)[0]])
    # the learner's values differ from those of the adapted weights only by rounding
    torch.testing.assert_close(meta_gradient(learner, [(before, after)]), wanted, atol=1e-5, rtol=1e-3)


def test_the_second_order_meta_gradient_is_the_derivative_of_the_adapted_loss() -> None:
    """Central differences of loss(theta - a grad loss(theta)) along the gradient."""
    settings = MamlConfig(inner_lr=0.5, second_order=True, max_gradient_norm=1e6, lr=1e-9, clip=10.0)
    learner = MamlLearner(inputs(settings, actions="continuous"), slots_per_task=2)
    pairs = [(play(learner, 1, length=30), play(learner, 2, length=30))]
    gradient = meta_gradient(learner, pairs)
    tasks = list(zip(*(learner._tasks(each) for each in pairs[0]), strict=True))

    def objective() -> float:
        return float(sum(learner._terms(learner._adapt(a), b)[0].detach() for a, b in tasks) / len(tasks))

    direction, size = gradient / gradient.norm(), 1e-2
    found = []
    for sign in (1, -2):
        learner._flat.data.add_(direction, alpha=sign * size)
        found.append(objective())
    measured = (found[0] - found[1]) / (2 * size)
    assert measured == pytest.approx(float(gradient.norm()), rel=0.02)
    first = MamlLearner(inputs(settings.model_copy(update={"second_order": False}), actions="continuous"), 2)
    other = meta_gradient(first, pairs)
    assert float(other @ direction) != pytest.approx(measured, rel=0.05), "both orders have the same gradient"


def test_an_lstm_is_refused() -> None:
    with pytest.raises(ConfigError, match="the inner step has no recurrent state"):
        MamlLearner(inputs(MamlConfig(), "lstm"))


def test_maml_gives_each_task_its_own_policy_and_then_new_tasks() -> None:
    with ExitStack() as stack:
        recipe = opened(stack, "maml", workers={"slots": 3, "steps": 21, "actors": 2})
        metrics = list(recipe.steps(3))
        assert recipe.system.learner.version == 3
        assert all(each["actor/steps/sum"].value == 2 * 2 * 3 * 20 for each in metrics)
        assert len({each["episode/return_before/mean"].value for each in metrics}) == 3
        again = next(iter(recipe.steps(1)))
        assert again["actor/lag/mean"].value == 0


def after_one_step(recipe: OpenedRecipe, inner_lr: float, rounds: int = 3) -> tuple[float, float]:
    """Return the returns on new tasks before and after a step, without learning."""
    learner = recipe.system.learner
    learner._settings = learner._settings.model_copy(update={"inner_lr": inner_lr, "lr": 1e-30})
    found = list(recipe.steps(rounds, seed=1000))
    names = ("episode/return_before/mean", "episode/return/mean")
    before, after = (float(np.mean([each[name].value for each in found])) for name in names)
    return before, after


MAML = {"lr": 3e-3, "inner_lr": 0.3, "max_gradient_norm": 5.0, "workers": {"slots": 20, "steps": 210}}


@pytest.mark.slow
def test_maml_learns_to_adapt() -> None:
    """The best policy without a task stays where it is: -20."""
    with ExitStack() as stack:
        recipe = opened(stack, "maml", **MAML)
        list(recipe.steps(22))
        _, after = after_one_step(recipe, 0.3, rounds=2)
        assert after > -17


@pytest.mark.slow
def test_maml_beats_the_control_that_never_adapted() -> None:
    found = {}
    for inner_lr in (0.3, 0.0):
        with ExitStack() as stack:
            recipe = opened(stack, "maml", **{**MAML, "inner_lr": inner_lr})
            list(recipe.steps(60))
            found[inner_lr] = after_one_step(recipe, 0.3)
    assert found[0.3][1] > max(found[0.0]) + 3


def filled(num_rows: int = 400) -> ReplayBuffer:
    """Return transitions of s' = s + 0.1 a, r = s'_0."""
    random = np.random.default_rng(0)
    observations = random.normal(size=(num_rows + 1, 1, 2)).astype(np.float32)
    box = spaces.Box(-2, 2, (2,), np.float32)
    data = ReplayBuffer(MbMpoConfig().replay.model_copy(update={"capacity": 1000}), box, box, discount=1.0)
    flags = np.zeros((num_rows, 1), bool)
    actions = 10 * np.diff(observations, axis=0)
    scaled = np.clip(actions, -2, 2) * np.float32(0.1)
    for t in range(num_rows):
        pair = np.stack([observations[t], observations[t] + scaled[t]])
        data.add(
            Fragment(
                observations=pair,
                actions=actions[t : t + 1],
                rewards=pair[1:, :, 0],
                terminated=flags[:1],
                truncated=~flags[:1],
                valid=~flags[:1],
                versions=np.zeros(1, np.int64),
            )
        )
    return data


def test_models_predict_and_differ() -> None:
    box = spaces.Box(-2, 2, (2,), np.float32)
    models = Models(filled(), MbMpoConfig(members=3, model_steps=500), box, seed=0)
    random = np.random.default_rng(1)
    observations = np.tile(random.normal(size=(50, 2)).astype(np.float32), (3, 1))
    actions = np.tile(random.uniform(-5, 5, size=(50, 2)).astype(np.float32), (3, 1))
    after, rewards = models.predict(observations, actions)
    wanted = observations + 0.1 * actions.clip(-2, 2)
    assert np.abs(after - wanted).mean() < 0.03
    assert np.abs(rewards - wanted[:, 0]).mean() < 0.1
    members = after.reshape(3, 50, 2)
    assert not np.allclose(members[0], members[1])


def test_imagined_episodes_begin_at_real_observations_and_end_at_the_horizon() -> None:
    box = spaces.Box(-2, 2, (2,), np.float32)
    models = Models(filled(), MbMpoConfig(members=2, model_steps=1), box, seed=0)
    environment = ImaginedEnvironment(models, 6, (box, box), horizon=3)
    first = environment.reset(5)
    assert all(any(np.array_equal(each, start) for start in models.starts) for each in first)
    stepped = [environment.step(np.zeros((6, 2), np.float32)) for _ in range(3)]
    assert [bool(each.truncated.all()) for each in stepped] == [False, False, True]
    assert len(stepped[-1].episodes) == 6
    np.testing.assert_array_equal(environment.reset(5), first)


MB_MPO = {"members": 3, "imagined": 16, "updates": 15, "lr": 2e-3, "inner_lr": 0.2, "max_gradient_norm": 5.0}


def test_mb_mpo_learns_from_few_real_steps() -> None:
    """A policy that stays has -20."""
    with ExitStack() as stack:
        given = {**MB_MPO, "arguments": {"goal": 1.0}, "workers": {"slots": 3, "steps": 21}}
        recipe = opened(stack, "mb_mpo", **given)
        metrics = list(recipe.steps(6))
        assert metrics[-1]["model/loss/mean"].value < 0.1
        assert max(each["episode/return/mean"].value for each in metrics[1:]) > -15


def test_the_adapted_policies_take_turns_in_the_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as stack:
        given = {**MB_MPO, "updates": 2, "model_steps": 1, "workers": {"slots": 1, "steps": 21}}
        recipe = opened(stack, "mb_mpo", **given)
        learner: MbMpoLearner = recipe.system.learner
        policies: list[list[Weights]] = []

        def recorded(data: ReplayBuffer) -> tuple[list[Weights], Metrics]:
            weights, metrics = MbMpoLearner.search(learner, data)
            policies.append(weights)
            return weights, metrics

        monkeypatch.setattr(learner, "search", recorded)
        for count, _ in enumerate(recipe.steps(4), start=1):
            acting = recipe.system.actors.call(0, first_task).read(10)
            for name, value in policies[-1][count % 3].items():
                np.testing.assert_array_equal(acting[name], value)


def first_task(actor: Any) -> Weights:
    return weights_of(actor.policies["policy"]._tasks[0].network)


def test_mb_mpo_refuses_what_its_models_do_not_predict() -> None:
    with ExitStack() as stack, pytest.raises(ConfigError, match=r"does not fit the space Discrete\(2\)"):
        OpenedRecipe(stack, {"name": "mb_mpo"}, environment={"id": "CartPole-v1"})
    with ExitStack() as stack:
        recipe = opened(stack, "mb_mpo", **MB_MPO, arguments={"goal": 0.0})
        ended = replace(play(OnPolicyLearner(inputs())), terminated=np.ones((9, 4), bool))
        with pytest.raises(TrainingError, match="models predict no termination"):
            search(recipe.system, MbMpoConfig(), filled()).begin(PlanContext())(ended)
